"""Base class for the layouts that shard a model within a replica: FSDP and Domino.

The model is sharded before the optimizer is created. Checkpoints contain full tensors, which rank 0
gathers in CPU memory. If they are too large for that, the ranks of the first replica write their
shards to a folder (`resume.folders`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.fit.checks import (
    REFUSED_IF_SHARDED,
    refuse_callbacks,
    refuse_fp16,
    refuse_muon,
    refuse_timed_validation,
)
from lightning_commfree.fit.contracts import Layout
from lightning_commfree.layouts.fsdp import check_optimizers
from lightning_commfree.model.meta_init import meta_fingerprint, on_meta
from lightning_commfree.model.replication import START_TAG, broadcast_initial_weights
from lightning_commfree.resume.folders import read_folder_tensors


class States(Protocol):
    """Interface to a sharded model's states: gathers full states, and extracts shards from them.

    Gathering is collective within a replica. Ranks with `keep=False` get {}.
    """

    def full_state_dict(self, keep: bool) -> dict[str, Any]:
        """Gather the module's full state."""

    def shard_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of the module's full state."""

    def full_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Gather an optimizer's full state."""

    def shard_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's shards of an optimizer's full state."""


class ShardedReplica(Layout):
    """A layout in which each rank of a replica holds shards of the model.

    `settings` are the layout's settings, which must be the same on all ranks.
    """

    shards_model = True

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._was_on_meta = False  # the model had no values before it was sharded

    @property
    @abstractmethod
    def states(self) -> States | None:
        """The sharded model's states; None if no model is currently sharded."""

    @property
    @override
    def shares_model(self) -> bool:
        return self.states is not None and self.size > 1

    @property
    def restores_after_setup(self) -> bool:  # type: ignore[override]
        """Whether the model is on `meta`, so that checkpoints are loaded only after sharding."""
        return self._was_on_meta or bool(on_meta(self.fit.module))

    @override
    def check(self) -> None:
        fit = self.fit
        refuse_timed_validation(fit.strategy, fit.trainer)
        refuse_fp16(fit.strategy, fit.precision)
        if self.size > 1:
            refuse_callbacks(fit.trainer, fit.strategy, REFUSED_IF_SHARDED)

    def _start(self) -> int:
        """Copy rank 0's full model to all ranks; return a random seed that all of them share."""
        module, world = self.fit.module, self.fit.channels.world
        self._was_on_meta = self.restores_after_setup
        settings = {**self.fit.fingerprint, "inside": repr(self._settings)}
        broadcast_initial_weights(world, module, {**settings, **meta_fingerprint(module)})
        seed = torch.tensor(torch.initial_seed() % 2**31)
        return int(world.broadcast(seed, START_TAG).wait())

    @override
    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        check_optimizers(optimizers, set(self.fit.module.parameters()))
        if self.size > 1:
            refuse_muon(self.fit.strategy, optimizers)

    @override
    def release(self) -> None:
        self._was_on_meta = False

    # -- states

    @override
    def full_module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's full state in CPU memory on rank 0, and {} on other ranks.

        Collective within the first replica.
        """
        states = self.states
        if states is None:
            return read()
        return states.full_state_dict(self._keeps) if self._gathers() else {}

    @override
    def full_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's full state on rank 0, like `full_module_state`."""
        states = self.states
        if states is None:
            return state
        return states.full_optimizer_state(optimizer, self._keeps) if self._gathers() else {}

    @override
    def with_module_shards(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        state, states = self._read(checkpoint["state_dict"]), self.states
        shards = state if states is None else states.shard_state_dict(state)
        return {**checkpoint, "state_dict": shards}

    @override
    def with_optimizer_shards(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        states = self.states
        if states is None:
            return checkpoint
        saved = zip(self.fit.optimizers(), checkpoint["optimizer_states"], strict=True)
        shards = [
            states.shard_optimizer_state(optimizer, self._read_optimizer(optimizer, state))
            for optimizer, state in saved
        ]
        return {**checkpoint, "optimizer_states": shards}

    # -- inside

    def _read(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a module's state after loading tensors that are still in a checkpoint folder."""
        found: Mapping[str, Any] = read_folder_tensors(state)
        return found

    def _read_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an optimizer's state after loading tensors still in a checkpoint folder."""
        del optimizer
        found: Mapping[str, Any] = read_folder_tensors(state)
        return found

    @property
    def _keeps(self) -> bool:
        return self.fit.ranks.rank == 0

    def _gathers(self) -> bool:
        """Return whether this rank helps gather states on rank 0; False if `Ranks.interrupted`."""
        return self.fit.ranks.rank < self.size and not self.fit.ranks.interrupted
