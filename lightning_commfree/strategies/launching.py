"""How ranks start, and how those leave in order that are forked or spawned, without a result.

1. SIGTERM comes to a rank. All ranks stop after the same step and end by `SIGTERMException`, which
   leaves a process with exit code 0.
2. Lightning's launcher sees that all have ended well and waits for the result of the first: for
   ever. No `on_exception` hook has run: Lightning calls them where it launches.

Here the ranks run the hooks, which save what they save; the first rank says that it leaves without
a result; and the launching process ends as the ranks did (`OrderlyLauncher`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_commfree.lightning_internals import LAUNCH, OrderlyLauncher

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


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
