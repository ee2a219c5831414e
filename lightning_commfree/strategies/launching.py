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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_commfree.lightning_internals import LAUNCH, Processes, interrupt
from lightning_commfree.patches import Patches

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class _Left(NamedTuple):
    """In place of a result."""

    by_sigterm: bool


class OrderlyLauncher(Processes):
    """Starts ranks in processes; ends with `SystemExit` where they did so."""

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
        # they have run on the ranks; here the model is untrained, and they must not save it
        patches: Patches = cast(Any, trainer.strategy).patches
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            patches.put(callback, "on_exception", lambda *_: None)
        raise SIGTERMException if output.by_sigterm else SystemExit


def orderly(launcher: Any, strategy: ReplicaStrategy, start_method: str) -> Any:
    """Return a launcher whose ranks leave in order, in place of Lightning's.

    First it lets the strategy look at what will be run, in the launching process: what cannot be
    trained is refused at once, and once. It pickles, as a module that has its Trainer does.

    Args:
        launcher: Lightning's; None: the ranks are there.
        strategy: whose ranks start.
        start_method: "popen", "fork", "spawn" or "forkserver".
    """
    if launcher is None or not LAUNCH.works(None):
        return launcher
    if start_method != "popen":
        launcher = OrderlyLauncher(strategy, start_method)
    check = strategy.inside.check_before_launch
    launcher.launch = partial(_check_and_launch, check, launcher.launch)
    return launcher


def _check_and_launch(
    check: Callable[[pl.Trainer | None], None],
    launch: Callable[..., Any],
    function: Any,
    *args: Any,
    trainer: pl.Trainer | None = None,
    **kwargs: Any,
) -> Any:
    check(trainer)
    return launch(function, *args, trainer=trainer, **kwargs)
