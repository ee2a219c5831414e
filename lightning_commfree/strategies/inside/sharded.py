"""A model that is divided among the ranks of a replica, whatever divides it.

It is divided before the optimizer is made. Its checkpoints are whole files, and nobody holds
all of one: where our own plugin writes to a disk, rank 0 has stand-ins in the checkpoint and asks
for their values while it writes (`comm.wholes`). Hooks may keep, rename or remove stand-ins. Where
another plugin writes, or to another file system, and outside of a fit, rank 0 puts everything
together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.model.fsdp import check_optimizers
from lightning_commfree.model.meta_init import described, on_meta
from lightning_commfree.model.replication import START_TAG, common_start
from lightning_commfree.model.shards import OneAtATime, Wholes, with_values
from lightning_commfree.resume.checkpoint_io import WholeCheckpointIO
from lightning_commfree.resume.files import FilePath, local_path
from lightning_commfree.resume.folders import IntoFolder
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
    """Whole states out of the ranks' parts, collective within a replica, and parts of wholes."""

    def whole_state_dict(self, wholes: Wholes) -> dict[str, Any]:
        """Return the module's whole state."""

    def part_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank holds of it."""

    def whole_optimizer_state(self, optimizer: Optimizer, wholes: Wholes) -> dict[str, Any]:
        """Return an optimizer's whole state."""

    def part_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what this rank holds of it."""


class DividedModel(Inside):
    """Ranks of a replica hold parts of its model, from before the optimizer is made on.

    Args:
        strategy: whose ranks.
        settings: equal on all of them.
    """

    divides = True

    def __init__(self, strategy: ReplicaStrategy, settings: Any) -> None:
        self._strategy, self._settings = strategy, settings
        self._undivided: set[nn.Parameter] = set()
        self._was_on_meta = False  # it had no values when it was divided
        self._writes: Wholes | None = None  # while `Trainer.save_checkpoint` runs

    @property
    @abstractmethod
    def states(self) -> States | None:
        """The states of what is divided now; None: nothing is."""

    @property
    def saves_folders(self) -> bool:
        """Whether the fit's checkpoints are folders."""
        return False

    @property
    def restores_after_setup(self) -> bool:  # type: ignore[override]
        """Whether a checkpoint has room in it only once it is divided: it is on `meta`."""
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
        """Start all ranks from the same undivided model; return a seed that they have alike."""
        module, world = self._strategy.module, self._strategy.channels.world
        self._was_on_meta = self.restores_after_setup
        settings = {**self._strategy.fingerprint(), "inside": repr(self._settings)}
        common_start(world, module, {**settings, **described(module)})
        self._undivided = set(module.parameters())
        seed = torch.tensor(torch.initial_seed() % 2**31)
        return int(world.broadcast(seed, START_TAG).wait())

    @override
    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Look at the optimizers, and let the fit's checkpoints be put together when written."""
        check_optimizers(optimizers, self._undivided - set(self._strategy.module.parameters()))
        self._undivided = set()
        self._put_together_while_written()

    @override
    def release(self) -> None:
        self._was_on_meta = False

    # -- states

    @override
    def whole_module(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the whole module's state on rank 0, in host memory, put together tensor by tensor.

        Collective over the first replica; empty on other ranks. For a checkpoint of a fit's it has
        stand-ins.
        """
        states = self.states
        if states is None:
            return read()
        return states.whole_state_dict(self._wholes()) if self._takes_part() else {}

    @override
    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, as `whole_module` does."""
        states = self.states
        if states is None:
            return state
        wholes = self._wholes()
        return states.whole_optimizer_state(optimizer, wholes) if self._takes_part() else {}

    @override
    def with_module_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        states = self.states
        if states is None:
            return {**checkpoint, "state_dict": with_values(checkpoint["state_dict"])}
        return {**checkpoint, "state_dict": states.part_state_dict(checkpoint["state_dict"])}

    @override
    def with_optimizer_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        states = self.states
        if states is None:
            return checkpoint
        saved = zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True)
        parts = [states.part_optimizer_state(optimizer, state) for optimizer, state in saved]
        return {**checkpoint, "optimizer_states": parts}

    @override
    def writing(self) -> AbstractContextManager[None]:
        """In the body rank 0 writes, and the others of its replica answer."""
        if self._writes is None or not self._is_of_first_replica():
            return nullcontext()
        return self._writes.writing()

    # -- inside

    def _takes_part(self) -> bool:
        """Return whether this rank gathers what rank 0 writes; none does after Ctrl-C."""
        return self._is_of_first_replica() and self._strategy.ranks.come()

    def _is_of_first_replica(self) -> bool:
        return self._strategy.global_rank < self.size

    def _wholes(self) -> Wholes:
        """Return what puts tensors together now."""
        return self._writes or Wholes(self._strategy.is_global_zero)

    def _put_together_while_written(self) -> None:
        strategy, trainer = self._strategy, self._strategy.module.trainer
        save = trainer.save_checkpoint

        def save_one_at_a_time(filepath: FilePath, *args: Any, **kwargs: Any) -> None:
            options = kwargs.get("storage_options", args[1] if len(args) > 1 else None)
            writer = strategy.checkpoint_io
            on_disk = local_path(filepath) is not None and options is None
            if type(writer) is not WholeCheckpointIO or not on_disk:
                save(filepath, *args, **kwargs)
                return
            here = strategy.is_global_zero, strategy.channels.within
            if self.saves_folders:
                self._writes = writer.into = IntoFolder(*here)
            else:
                self._writes = OneAtATime(*here)
            try:
                save(filepath, *args, **kwargs)
            finally:
                self._writes = writer.into = None

        strategy.patches.put(trainer, "save_checkpoint", save_one_at_a_time)
