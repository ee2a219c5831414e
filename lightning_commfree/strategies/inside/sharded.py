"""A replica whose ranks hold shards of one model, by FSDP or Domino.

The model is sharded before the optimizer is made. Its checkpoints hold full tensors, which rank 0
gathers in host memory. Where they are too large for that, the ranks of the first replica write
their shards into a folder (`resume.folders`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.model.fsdp import check_optimizers
from lightning_commfree.model.meta_init import described, on_meta
from lightning_commfree.model.replication import START_TAG, common_start
from lightning_commfree.resume.folders import with_values
from lightning_commfree.strategies.checks import (
    PARTS,
    refuse_callbacks,
    refuse_fp16,
    refuse_timed_validation,
)
from lightning_commfree.strategies.contracts import Inside

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class States(Protocol):
    """Full states out of the ranks' shards, collective within a replica, and shards of states."""

    def whole_state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's full state, {} on ranks that do not `keep` it."""

    def part_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of it."""

    def whole_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Return an optimizer's full state."""

    def part_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's shards of it."""


class DividedModel(Inside):
    """Ranks of a replica hold shards of its model, from before the optimizer is made on.

    Args:
        strategy: whose ranks.
        settings: equal on all of them.
    """

    divides = True

    def __init__(self, strategy: ReplicaStrategy, settings: Any) -> None:
        self._strategy, self._settings = strategy, settings
        self._undivided: set[nn.Parameter] = set()
        self._was_on_meta = False  # the model had no values before it was sharded

    @property
    @abstractmethod
    def states(self) -> States | None:
        """The states of the sharded model; None: no model is sharded now."""

    @property
    def restores_after_setup(self) -> bool:  # type: ignore[override]
        """Whether a checkpoint fits only into the sharded model: before, it is on `meta`."""
        module = self._strategy.lightning_module
        return self._was_on_meta or (module is not None and bool(on_meta(module)))

    @override
    def check(self, strategy: ReplicaStrategy, trainer: pl.Trainer) -> None:
        name = type(strategy).__name__
        refuse_timed_validation(name, trainer)
        refuse_fp16(name, strategy.precision_plugin)
        if self.size > 1:
            refuse_callbacks(trainer, name, PARTS)

    def _start(self) -> int:
        """Start all ranks from the same full model; return a seed that they share."""
        module, world = self._strategy.module, self._strategy.channels.world
        self._was_on_meta = self.restores_after_setup
        settings = {**self._strategy.fingerprint(), "inside": repr(self._settings)}
        common_start(world, module, {**settings, **described(module)})
        self._undivided = set(module.parameters())
        seed = torch.tensor(torch.initial_seed() % 2**31)
        return int(world.broadcast(seed, START_TAG).wait())

    @override
    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        check_optimizers(optimizers, self._undivided - set(self._strategy.module.parameters()))
        self._undivided = set()

    @override
    def release(self) -> None:
        self._was_on_meta = False

    # -- states

    @override
    def whole_module(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's full state on rank 0, in host memory; {} on other ranks.

        Collective within the first replica.
        """
        states = self.states
        if states is None:
            return read()
        return states.whole_state_dict(self._keeps) if self._takes_part() else {}

    @override
    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's full state on rank 0, as `whole_module` does."""
        states = self.states
        if states is None:
            return state
        return states.whole_optimizer_state(optimizer, self._keeps) if self._takes_part() else {}

    @override
    def with_module_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        state, states = self._read(checkpoint["state_dict"]), self.states
        parts = state if states is None else states.part_state_dict(state)
        return {**checkpoint, "state_dict": parts}

    @override
    def with_optimizer_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        states = self.states
        if states is None:
            return checkpoint
        saved = zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True)
        parts = [
            states.part_optimizer_state(optimizer, self._read_optimizer(optimizer, state))
            for optimizer, state in saved
        ]
        return {**checkpoint, "optimizer_states": parts}

    # -- inside

    def _read(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a module's state of a checkpoint, with values if it is a folder."""
        found: Mapping[str, Any] = with_values(state)
        return found

    def _read_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an optimizer's state of a checkpoint, with values if it is a folder."""
        del optimizer
        found: Mapping[str, Any] = with_values(state)
        return found

    @property
    def _keeps(self) -> bool:
        return self._strategy.is_global_zero

    def _takes_part(self) -> bool:
        """Return whether this rank gathers for rank 0; none does after Ctrl-C."""
        return self._strategy.global_rank < self.size and not self._strategy.ranks.interrupted
