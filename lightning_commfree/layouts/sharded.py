"""Base class for the layouts that shard a model within a replica: FSDP and Domino.

The model is sharded before the optimizer is created. Checkpoints contain full tensors, which rank 0
gathers in CPU memory. Where they are too large for that, `FSDPSettings.folder_above_bytes` lets the
ranks of the first replica write their shards to a folder (`resume.folders`).
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
from lightning_commfree.model.meta_init import meta_fingerprint
from lightning_commfree.model.replication import START_TAG, broadcast_initial_weights
from lightning_commfree.resume.folders import read_folder_tensors


class Shards(Protocol):
    """Interface of a sharded model: gathers its full states, and extracts a rank's shards.

    Gathering is collective within a replica. Ranks with `keep=False` get {}.
    """

    def full_state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's full state, or {} if `keep` is False; collective."""

    def shard_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of the module's full state."""

    def full_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Return an optimizer's full state, or {} if `keep` is False; collective."""

    def shard_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's shards of an optimizer's full state."""


class ShardedReplica(Layout):
    """Base class of layouts in which each rank of a replica holds shards of the model.

    It implements `ShardedStates` itself. `settings` are the layout's settings, which must be the
    same on all ranks.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self.states = self

    @property
    @abstractmethod
    def shards(self) -> Shards | None:
        """The sharded model; None if no model is currently sharded."""

    @override
    def check(self) -> None:
        """Raise a `ValueError` for settings and callbacks that no sharded layout supports."""
        fit = self.fit
        refuse_timed_validation(fit.strategy, fit.trainer)
        refuse_fp16(fit.strategy, fit.precision)
        if self.size > 1:
            refuse_callbacks(fit.trainer, fit.strategy, REFUSED_IF_SHARDED)

    def _start(self) -> int:
        """Copy rank 0's full model to all ranks; return a random seed that all of them share."""
        module, world = self.fit.module, self.fit.channels.world
        settings = {**self.fit.fingerprint, "inside": repr(self._settings)}
        broadcast_initial_weights(world, module, {**settings, **meta_fingerprint(module)})
        seed = torch.tensor(torch.initial_seed() % 2**31)
        return int(world.broadcast(seed, START_TAG).wait())

    @override
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a `ValueError` for Muon, and for optimizers of other than sharded parameters."""
        check_optimizers(optimizers, set(self.fit.module.parameters()))
        if self.size > 1:
            refuse_muon(self.fit.strategy, optimizers)

    # -- states (`ShardedStates`)

    @property
    def shares_model(self) -> bool:
        """Whether the ranks of a replica currently hold shards of one model."""
        return self.shards is not None and self.size > 1

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are currently saved as folders, written by all ranks of a replica."""
        return False

    def module_state_to_save(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's full state on the CPU on rank 0, {} on others; collective.

        Only the ranks of the first replica take part. If no model is sharded, return `read()`.
        """
        shards = self.shards
        if shards is None:
            return read()
        return shards.full_state_dict(self._keeps) if self._gathers() else {}

    def optimizer_state_to_save(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's full state on rank 0, {} on others; collective."""
        shards = self.shards
        if shards is None:
            return state
        return shards.full_optimizer_state(optimizer, self._keeps) if self._gathers() else {}

    def with_module_shards(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of `checkpoint` with the module's state replaced by this rank's shards."""
        state, shards = self._read_module_state(checkpoint["state_dict"]), self.shards
        own = state if shards is None else shards.shard_state_dict(state)
        return {**checkpoint, "state_dict": own}

    def with_optimizer_shards(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of `checkpoint` with optimizer states replaced by this rank's shards."""
        shards = self.shards
        if shards is None:
            return checkpoint
        saved = zip(self.fit.optimizers(), checkpoint["optimizer_states"], strict=True)
        own = [
            shards.shard_optimizer_state(optimizer, self._read_optimizer_state(optimizer, state))
            for optimizer, state in saved
        ]
        return {**checkpoint, "optimizer_states": own}

    # -- inside

    def _read_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a module's state after loading tensors that are still in a checkpoint folder."""
        found: Mapping[str, Any] = read_folder_tensors(state)
        return found

    def _read_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return an optimizer's state after loading tensors still in a checkpoint folder."""
        del optimizer
        found: Mapping[str, Any] = read_folder_tensors(state)
        return found

    @property
    def _keeps(self) -> bool:
        """Whether this rank keeps the states that it helps to gather: only rank 0 of the job."""
        return self.fit.ranks.rank == 0

    def _gathers(self) -> bool:
        """Return whether this rank helps gather states on rank 0; False if `Ranks.interrupted`."""
        return self.fit.ranks.rank < self.size and not self.fit.ranks.interrupted
