"""Untrained tensors that can differ between ranks: mean teachers, counters, queues, caches.

Hooks change them. A checkpoint holds rank 0's, and no non-persistent buffers at all, so each rank
saves those that a resume would otherwise get wrong: the persistent ones that are not what the
checkpoint gives this rank, and the non-persistent ones that have changed since the fit began.
Trained parameters and averaged floating-point buffers are not among them: the strategy restores
those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.model.replication import differ_from_first
from lightning_commfree.model.shards import is_part, own

TAG = "save"  # of the ledger


class OwnTensors:
    """The untrained tensors of one fit.

    Args:
        module: as the fit finds it, the same on all ranks: no rank's own state is restored yet.
        optimizers: of this rank; the parameters that they train are left out.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._at_begin = _digests(self._tensors()[1])

    def state(self, channels: ReplicaChannels) -> dict[str, Tensor]:
        """Return the tensors that this rank must save, not copies; collective.

        Args:
            channels: to all ranks, and to those that hold the same shards in other replicas.
        """
        persistent, others = self._tensors()
        found: dict[str, Tensor] = {}
        # A large frozen base model is equal everywhere. The comparison, 8 bytes a tensor, keeps it
        # out of every rank's file.
        for channel, sharded in ((channels.world, False), (channels.between, True)):
            some = {name: one for name, one in persistent.items() if is_part(one) == sharded}
            differ = differ_from_first(channel, list(some.values()), TAG)
            found |= {name: some[name] for name, is_own in zip(some, differ, strict=True) if is_own}
        now = _digests(others)
        changed = {name for name, one in now.items() if one != self._at_begin.get(name)}
        found |= {name: others[name] for name in changed}
        return {name: own(tensor) for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` returned; a buffer that has another size now is replaced."""
        tensors = {name: own(one) for kind in self._tensors() for name, one in kind.items()}
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
        """Return the tensors that a checkpoint holds of rank 0, and those that it does not hold."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
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
        if not (is_lazy(tensor) or tensor.is_meta) and own(tensor).layout == torch.strided
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: int(digest(own(tensor).contiguous())) for name, tensor in tensors.items()}
