"""How ranks start, and how those leave in order that are forked or spawned, without a result.

1. SIGTERM comes to a rank. All ranks stop after the same step and end by `SIGTERMException`, which
   leaves a process with exit code 0.
2. Lightning's launcher sees that all have ended well and waits for the result of the first: for
   ever. No `on_exception` hook has run: Lightning calls them where it launches.

Here the ranks run the hooks, which save what they save; the first rank says that it leaves without
a result; and the launching process ends as the ranks did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_commfree.lightning_internals import LAUNCH, Processes, interrupt

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

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
        start_method: "popen", "fork", "spawn" or "forkserver".
    """

    def __init__(self, strategy: ReplicaStrategy, start_method: str) -> None:
        self._strategy, self._start_method = strategy, start_method
        self._launcher: Any = None

    def in_place_of(self, lightnings: Any) -> Any:
        """Return Lightning's launcher where the Trainer has one, but its ranks leave in order."""
        if lightnings is None or self._launcher is not None or not LAUNCH.works(None):
            return self._launcher or lightnings
        check = self._strategy.inside.check_before_launch
        if self._start_method == "popen":
            self._launcher = checked(lightnings, check)
        else:
            self._launcher = OrderlyLauncher(self._strategy, self._start_method, check)
        return self._launcher

    def restore_callbacks(self) -> None:
        """Give the Trainer back what ranks that have left took away, when its hooks have run."""
        if isinstance(self._launcher, OrderlyLauncher):
            self._launcher.restore_callbacks()
