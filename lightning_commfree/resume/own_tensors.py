"""Untrained tensors that can differ between ranks, such as a mean teacher's weights or a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import common_entries
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.model.replication import (
    AveragedBuffers,
    differ_from_first,
    persistent_buffers,
)
from lightning_commfree.model.shards import is_shard, local_tensor

TAG = "save"  # ledger tag


class OwnTensors:
    """Saves and restores untrained tensors that can differ between ranks.

    Examples are the weights of mean teachers, counters, queues and caches.

    A checkpoint contains only rank 0's tensors and no non-persistent buffers. So each rank saves
    the persistent tensors that differ from rank 0's, and the non-persistent buffers that changed
    during the fit. Trained parameters and averaged floating-point buffers are not included, because
    the strategy restores them.

    The module's own `state_dict` or a hook may leave tensors out of the checkpoint. Each rank then
    saves those that changed during the fit, trained or not, but not a frozen base model.

    Create this object before any rank has restored its own state. `optimizers` returns this rank's
    optimizers, which hooks may replace. `buffers` are the averaged buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Callable[[], Iterable[Optimizer]],
        buffers: AveragedBuffers | None = None,
    ) -> None:
        self._module, self._optimizers, self._buffers = module, optimizers, buffers
        persistent, others = self._tensors()
        self._at_begin = _digests(persistent | others)

    def state(self, channels: ReplicaChannels) -> dict[str, Tensor]:
        """Return the untrained tensors that this rank must save, without copies; collective."""
        persistent, others = self._tensors()
        found: dict[str, Tensor] = {}
        # a large frozen base model is the same on all ranks, and comparing hashes keeps it out of
        # the files
        for channel, sharded in ((channels.world, False), (channels.between, True)):
            some = {name: one for name, one in persistent.items() if is_shard(one) == sharded}
            # during a fit, a rank may have registered buffers or frozen parameters that others have
            # not; it saves them
            common = common_entries(channel, list(some))
            compared = [name for name in some if name in common]
            differ = differ_from_first(channel, [some[name] for name in compared], TAG)
            same = {name for name, is_own in zip(compared, differ, strict=True) if not is_own}
            found |= {name: tensor for name, tensor in some.items() if name not in same}
        found = {name: local_tensor(tensor) for name, tensor in found.items()}
        # buffers that changed their shape, even where equal: a new fit begins with the old shape
        reshaped = () if self._buffers is None else self._buffers.own
        return found | self.changed((*others, *reshaped))

    def absent_from(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the tensors that are not in `saved`, a module's `state_dict`.

        A tied tensor counts as saved if it is saved under one of its names.
        """
        names: dict[Tensor, list[str]] = {}
        parameters = self._module.named_parameters(remove_duplicate=False)
        buffers = persistent_buffers(self._module, remove_duplicate=False).items()
        for name, tensor in (*parameters, *buffers):
            names.setdefault(tensor, []).append(name)
        return [every[0] for every in names.values() if saved.keys().isdisjoint(every)]

    def changed(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors among `names` that changed during the fit, without copies."""
        every = self._all()
        found = {name: every[name] for name in names if name in every}
        now = _digests({name: one for name, one in found.items() if name in self._at_begin})
        return {
            name: local_tensor(tensor)
            for name, tensor in found.items()
            if name not in now or now[name] != self._at_begin[name]
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `state` returned; replace buffers of other shapes or dtypes."""
        tensors = {name: local_tensor(one) for name, one in self._all().items()}
        for name, saved in state.items():
            tensor = tensors.get(name)
            if tensor is None:
                self._replace(name, saved)
            elif (tensor.shape, tensor.dtype) == (saved.shape, saved.dtype):
                tensor.copy_(saved)
            else:
                self._replace(name, saved.to(tensor.device))

    def _replace(self, name: str, buffer: Tensor) -> None:
        """Replace a buffer by another tensor, or register it if the module does not have it."""
        owner, _, own_name = name.rpartition(".")
        module = self._module.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = buffer
        elif not hasattr(module, own_name):  # registered during the fit
            module.register_buffer(own_name, buffer)

    def _all(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name, except lazy, meta and sparse ones."""
        every = chain(self._module.named_parameters(), self._module.named_buffers())
        return _dense_and_materialized(dict(every))

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return two dicts of untrained tensors: persistent tensors, and non-persistent buffers.

        Averaged buffers are in neither dict, because the strategy restores them.
        """
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        kept = persistent_buffers(self._module)
        averaged = set() if self._buffers is None else set(self._buffers.averaged)
        persistent: dict[str, Tensor] = {
            name: p for name, p in self._module.named_parameters() if p not in trained
        }
        others: dict[str, Tensor] = {}
        for name, buffer in self._module.named_buffers():
            if name not in kept:
                others[name] = buffer
            elif name not in averaged:
                persistent[name] = buffer
        return _dense_and_materialized(persistent), _dense_and_materialized(others)


def _dense_and_materialized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are not lazy, meta or sparse."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta) and local_tensor(tensor).layout == torch.strided
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a hash of each tensor, or of this rank's shard of it, by name."""
    return {
        name: int(digest(local_tensor(tensor).contiguous())) for name, tensor in tensors.items()
    }
