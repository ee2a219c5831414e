"""Untrained tensors that can differ between ranks: mean teachers, counters, queues, caches.

A checkpoint contains only rank 0's tensors and no non-persistent buffers. So each rank saves those
of its persistent tensors that differ from rank 0's, and those of its non-persistent buffers that
changed during the fit. Trained parameters and averaged floating-point buffers are not included: the
strategy restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.model.replication import differ_from_first
from lightning_commfree.model.shards import is_shard, local_tensor

TAG = "save"  # in the ledger


class OwnTensors:
    """The untrained tensors in a fit; create it before any rank has restored its own state.

    `optimizers` returns this rank's optimizers, which hooks may replace.
    """

    def __init__(self, module: nn.Module, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._at_begin = _digests(self._tensors()[1])

    def state(self, channels: ReplicaChannels) -> dict[str, Tensor]:
        """Return the tensors that this rank has to save, without copying them; collective."""
        persistent, others = self._tensors()
        found: dict[str, Tensor] = {}
        # comparing digests keeps a large frozen base model, the same on all ranks, out of the files
        for channel, sharded in ((channels.world, False), (channels.between, True)):
            some = {name: one for name, one in persistent.items() if is_shard(one) == sharded}
            differ = differ_from_first(channel, list(some.values()), TAG)
            found |= {name: some[name] for name, is_own in zip(some, differ, strict=True) if is_own}
        now = _digests(others)
        changed = {name for name, one in now.items() if one != self._at_begin.get(name)}
        found |= {name: others[name] for name in changed}
        return {name: local_tensor(tensor) for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `state` returned; replace buffers whose size has changed."""
        persistent, others = self._tensors()
        tensors = {name: local_tensor(one) for name, one in (persistent | others).items()}
        for name, saved in state.items():
            tensor = tensors.get(name)
            if tensor is not None and tensor.shape == saved.shape:
                tensor.copy_(saved)
            else:
                self._replace(name, saved if tensor is None else saved.to(tensor))

    def _replace(self, name: str, buffer: Tensor) -> None:
        owner, _, own_name = name.rpartition(".")
        module = self._module.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = buffer

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the untrained tensors: those that a checkpoint contains, and all others."""
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        kept = self._module.state_dict(keep_vars=True)
        persistent: dict[str, Tensor] = {
            name: p for name, p in self._module.named_parameters() if p not in trained
        }
        others: dict[str, Tensor] = {}
        for name, buffer in self._module.named_buffers():
            if name not in kept:
                others[name] = buffer
            elif not buffer.is_floating_point():
                persistent[name] = buffer
        return _with_values(persistent), _with_values(others)


def _with_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta) and local_tensor(tensor).layout == torch.strided
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {
        name: int(digest(local_tensor(tensor).contiguous())) for name, tensor in tensors.items()
    }
