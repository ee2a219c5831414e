"""What all our strategies share.

Collectives of Lightning's, whose errors name the rank that is gone; checkpoint files that are whole
or not there, and errors of one rank that all ranks raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import get_default_backend_for_device
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.interface import GlooInterface, unreachable
from lightning_commfree.comm.unshared import Unshared
from lightning_commfree.comm.world import join_restarted_world
from lightning_commfree.lightning_internals import probe
from lightning_commfree.resume.rank_parts import copied
from lightning_commfree.resume.whole_files import (
    FilePath,
    WholeCheckpointIO,
    check_whole,
    damaged,
    local_path,
    writes_later,
)
from lightning_commfree.strategies.launching import OrderlyLauncher, ScriptLauncher, own_launcher
from lightning_commfree.strategies.signals import stopped_by_hand

T = TypeVar("T")


class NamingStrategy(DDPStrategy):
    """A `DDPStrategy` that knows who is there, once `_world_channel` is open.

    Attributes:
        liveness: whether the ranks find out who is gone, by a port of each; set it to False before
            `fit` to do without. `comm.liveness` says what that costs, and what the port lets in.
    """

    liveness: bool = True
    _world_channel: Channel | None = None  # to all ranks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.patience: timedelta = kwargs.get("timeout", default_pg_timeout)
        self._starts_by: str = kwargs.get("start_method", "popen")
        self._starter: OrderlyLauncher | ScriptLauncher | None = None
        self._plugin: CheckpointIO | None = None
        self._sockets = Unshared()
        self._interface = GlooInterface()

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's where the Trainer has one, but its ranks leave in order."""
        lightnings = super().launcher
        if lightnings is not None and self._starter is None:
            self._starter = own_launcher(self, self._starts_by)
        return lightnings if self._starter is None else self._starter

    @property
    def backend(self) -> str:
        """Of process groups on this rank's device."""
        return self.process_group_backend or get_default_backend_for_device(self.root_device)

    def check_before_launch(self, trainer: pl.Trainer | None) -> None:
        """Look at what is going to run, in the process that will launch the ranks.

        What is refused here is refused at once, and once.

        Args:
            trainer: whose state says what it is; None for something that is not a Trainer's.
        """

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self.launcher, OrderlyLauncher):
            self.launcher.restore_callbacks()  # Lightning has called their hooks by now
        super().on_exception(exception)

    @override
    def setup_environment(self) -> None:
        several_machines = self.num_nodes > 1
        if several_machines:
            assert self.cluster_environment is not None, "the Trainer has found it"
            self._interface.tell(self.cluster_environment.main_address)
        try:
            # a rank that is killed is gone, whoever it has forked off
            with self._sockets.opening():
                super().setup_environment()
        except RuntimeError as error:
            if several_machines and "gloo" in str(error).lower():
                raise RuntimeError(unreachable(error)) from error
            raise

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            probe(trainer)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        self._interface.take_back()
        super().teardown()

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        join_restarted_world(
            self.backend,
            self.global_rank,
            self.world_size,
            self.patience,
            self.root_device,
        )
        super().setup_distributed()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._stopped_by_hand():
            return
        with self._named("barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._stopped_by_hand():
            return obj
        with self._named("broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        with self._named("reduce"):
            return super().reduce(tensor, group, reduce_op)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, else one whose files are whole; `AsyncCheckpointIO` wraps that."""
        if self._plugin is None:
            self._plugin = WholeCheckpointIO()
        elif hasattr(self._plugin, "checkpoint_io"):  # it keeps the first one that it gets
            self._plugin.checkpoint_io = WholeCheckpointIO()
        return self._plugin

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._plugin = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: FilePath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint on rank 0.

        Raises:
            RuntimeError: it cannot be written; on all ranks.
        """
        with self.failing_as_one():
            if self.is_global_zero and writes_later(self.checkpoint_io):
                # Lightning before 2.6 writes what the tensors have become meanwhile
                checkpoint = copied(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: FilePath, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            RuntimeError: it is damaged.
        """
        check_whole(checkpoint_path)
        try:  # later releases of Lightning pass more arguments
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            local = local_path(checkpoint_path)
            if local is None or not local.is_file() or "weights_only" in str(error):
                raise
            raise damaged(checkpoint_path, error) from error
        return checkpoint

    @contextmanager
    def failing_as_one(self) -> Iterator[None]:
        """If the body fails on some rank, let all ranks raise: their own error, or that one's."""
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is raised below
            failure = error
        failed = self.all_flags(failure is not None)
        if any(failed):
            text = self.broadcast(str(failure), failed.index(True))
            raise failure or RuntimeError(text)

    def all_flags(self, mine: bool) -> list[bool]:
        """Return the flags of all ranks, by rank."""
        flags = torch.zeros(self.world_size, device=self.root_device)
        flags[self.global_rank] = float(mine)
        total = NamingStrategy.reduce(self, flags, reduce_op="sum")
        return [bool(flag) for flag in total.tolist()]

    def _stopped_by_hand(self) -> bool:
        """Return whether this is after Ctrl-C, when the ranks no longer do the same."""
        module = self.lightning_module
        try:
            return module is not None and stopped_by_hand(module.trainer)
        except RuntimeError:  # no Trainer: it launched the ranks, which trained a copy, and is back
            return False

    def _named(self, what: str) -> AbstractContextManager[None]:
        """In the body, a collective of Lightning's that fails names the rank that is gone."""
        world = self._world_channel
        # a tensor on the wrong device fails here too, and is nobody's death
        return nullcontext() if world is None else world.naming_lost(what, computing=True)
