"""Ranks that are forked or spawned and leave in order, without a result.

1. SIGTERM comes to a rank. All ranks stop after the same step and end by `SIGTERMException`, which
   leaves a process with exit code 0.
2. Lightning's launcher sees that all have ended well and waits for the result of the first: for
   ever. No `on_exception` hook has run: Lightning calls them where it launches.

Here the ranks run the hooks, which save what they save; the first rank says that it leaves without
a result; and the launching process ends as the ranks did.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override


class _Left(NamedTuple):
    """In place of a result."""

    by_sigterm: bool


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts ranks as copies of the script; first lets the strategy look at what will be run."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(
        self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        self._strategy.check_before_launch(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class OrderlyLauncher(_MultiProcessingLauncher):
    """Starts ranks in processes; ends with `SystemExit` where they did so.

    First it lets the strategy look at what will be run.

    The `on_exception` hooks of callbacks have run on the ranks by then. In the launching process,
    whose model is untrained, they must not save anything: callbacks are out of its Trainer until
    `restore_callbacks`.
    """

    _hidden: tuple[pl.Trainer, list[pl.Callback]] | None = None

    def restore_callbacks(self) -> None:
        """Give the Trainer its callbacks back."""
        if self._hidden is not None:
            trainer, callbacks = self._hidden
            trainer.callbacks, self._hidden = callbacks, None  # type: ignore[attr-defined]

    @override
    def launch(
        self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        strategy: Any = self._strategy
        strategy.check_before_launch(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Any,
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        try:
            super()._wrapping_function(
                process_idx, trainer, function, args, kwargs, return_queue, global_states
            )
        except SystemExit as end:
            if trainer is not None and isinstance(end, SIGTERMException):  # all ranks are here
                _interrupt(trainer, end)
                trainer._teardown()
            if process_idx == 0 and not end.code:  # else the launching process sees the code
                return_queue.put(_Left(isinstance(end, SIGTERMException)))
            raise

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if not isinstance(worker_output, _Left):
            super()._recover_results_in_main_process(worker_output, trainer)
            return
        self._hidden = (trainer, trainer.callbacks)  # type: ignore[attr-defined]
        trainer.callbacks = []  # type: ignore[attr-defined]
        raise SIGTERMException if worker_output.by_sigterm else SystemExit
