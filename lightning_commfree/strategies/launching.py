"""How ranks start, and how those leave in order that are forked or spawned, without a result.

1. SIGTERM comes to a rank. All ranks stop after the same step and end by `SIGTERMException`, which
   leaves a process with exit code 0.
2. Lightning's launcher sees that all have ended well and waits for the result of the first: for
   ever. No `on_exception` hook has run: Lightning calls them where it launches.

Here the ranks run the hooks, which save what they save; the first rank says that it leaves without
a result; and the launching process ends as the ranks did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_commfree.comm.network import Member
from lightning_commfree.comm.world import PATIENCE, default_backend
from lightning_commfree.lightning_internals import LAUNCH, Processes, interrupt
from lightning_commfree.resume.checkpoint_io import WholeCheckpointIO

# looks at what is going to run, in the process that will launch the ranks: what it refuses is
# refused at once, and once; None stands for something that is not a Trainer's
Check = Callable[[pl.Trainer | None], None]


class _Left(NamedTuple):
    """In place of a result."""

    by_sigterm: bool


def _check_and_launch(
    check: Check,
    launch: Callable[..., Any],
    function: Any,
    *args: Any,
    trainer: pl.Trainer | None = None,
    **kwargs: Any,
) -> Any:
    check(trainer)
    return launch(function, *args, trainer=trainer, **kwargs)


def checked(launcher: Any, check: Check) -> Any:
    """Return a launcher of Lightning's, which first lets the strategy look at what will be run.

    It pickles, as a module that has its Trainer does.
    """
    launcher.launch = partial(_check_and_launch, check, launcher.launch)
    return launcher


class OrderlyLauncher(Processes):
    """Starts ranks in processes; ends with `SystemExit` where they did so.

    First it lets the strategy look at what will be run.

    The `on_exception` hooks of callbacks have run on the ranks by then. In the launching process,
    whose model is untrained, they must not save anything: callbacks are out of its Trainer until
    `restore_callbacks`.
    """

    def __init__(self, strategy: Any, start_method: str, check: Check) -> None:
        super().__init__(strategy, start_method)
        self._check = check
        self._hidden: tuple[pl.Trainer, list[pl.Callback]] | None = None

    def restore_callbacks(self) -> None:
        """Give the Trainer its callbacks back."""
        if self._hidden is not None:
            trainer, callbacks = self._hidden
            trainer.callbacks, self._hidden = callbacks, None  # type: ignore[attr-defined]

    @override
    def launch(
        self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        self._check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def leave(
        self, rank: int, trainer: pl.Trainer | None, end: SystemExit, put: Callable[[Any], None]
    ) -> None:
        if trainer is not None and isinstance(end, SIGTERMException):  # all ranks are here
            interrupt(trainer, end)
        if rank == 0 and not end.code:  # else the launching process sees the code
            put(_Left(isinstance(end, SIGTERMException)))

    @override
    def take(self, output: Any, trainer: pl.Trainer) -> None:
        if not isinstance(output, _Left):
            super().take(output, trainer)
            return
        self._hidden = (trainer, trainer.callbacks)  # type: ignore[attr-defined]
        trainer.callbacks = []  # type: ignore[attr-defined]
        raise SIGTERMException if output.by_sigterm else SystemExit


class Starter:
    """Starts a strategy's ranks.

    Args:
        strategy: whose it is.
        ddp_kwargs: what `DDPStrategy` got.
        check: looks at what will be run, before the ranks are started.
        divides: ranks share a model, and read parts of a checkpoint.

    Attributes:
        plugin: the user's, for checkpoints.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        ddp_kwargs: Mapping[str, Any],
        check: Check,
        divides: bool,
    ) -> None:
        self._check, self._divides = check, divides
        self.plugin: CheckpointIO | None = ddp_kwargs.get("checkpoint_io")
        self._strategy = strategy
        self._timeout: timedelta = ddp_kwargs.get("timeout", PATIENCE)
        self._start_method: str = ddp_kwargs.get("start_method", "popen")
        self._launcher: Any = None

    def in_place_of(self, lightnings: Any) -> Any:
        """Return Lightning's launcher where the Trainer has one, but its ranks leave in order."""
        if lightnings is None or self._launcher is not None or not LAUNCH.works(None):
            return self._launcher or lightnings
        if self._start_method == "popen":
            self._launcher = checked(lightnings, self._check)
        else:
            self._launcher = OrderlyLauncher(self._strategy, self._start_method, self._check)
        return self._launcher

    def restore_callbacks(self) -> None:
        """Give the Trainer back what ranks that have left took away, when its hooks have run."""
        if isinstance(self._launcher, OrderlyLauncher):
            self._launcher.restore_callbacks()

    def checkpoint_io(self) -> CheckpointIO:
        """Return the user's plugin, else one whose files are whole; asynchronous ones wrap that."""
        if self.plugin is None:
            self.plugin = WholeCheckpointIO(maps=self._divides)
        elif hasattr(self.plugin, "checkpoint_io"):  # it keeps the first one that it gets
            self.plugin.checkpoint_io = WholeCheckpointIO(maps=self._divides)
        return self.plugin

    def member(self) -> Member:
        """Return what this process is among the others; it gets its rank."""
        strategy, several = self._strategy, self._strategy.num_nodes > 1
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        device = strategy.root_device
        return Member(
            strategy.global_rank,
            strategy.world_size,
            self._timeout,
            strategy.process_group_backend or default_backend(device),
            device,
            environment.main_address if environment is not None and several else None,
        )
