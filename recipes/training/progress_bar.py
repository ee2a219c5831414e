"""A progress bar over the optimizer steps of the whole run."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typing_extensions import override

_TERMINAL_SECONDS = 0.2
_LOG_FILE_SECONDS = 10.0
_COUNT = "step {task.completed:,.0f}/{task.total:,.0f}"


class StepProgressBar(ProgressBar):
    """Optimizer steps done, loss, tokens per second and kB sent per step, on rank 0.

    Lightning's own bars count the batches of an epoch, and a run's length is given in steps here.
    Into a file, where a bar cannot move, a line is written every ten seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._shown_at = 0.0  # seconds, of `time.monotonic`
        self._is_shown = True  # whether the last step has been

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled:
            return
        console = Console()
        columns = (
            TextColumn(_COUNT, markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        # `auto_refresh` would refresh from a thread of its own, between what others print
        self._bar = Progress(
            *columns, console=console, auto_refresh=False, disable=not console.is_terminal
        )
        self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, figures="")
        self._bar.start()
        self._shown_at, self._is_shown = time.monotonic(), True

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._bar is None or trainer.global_step <= self._bar.tasks[0].completed:
            return
        self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
        self._is_shown = False
        every = _LOG_FILE_SECONDS if self._bar.disable else _TERMINAL_SECONDS
        if time.monotonic() - self._shown_at >= every:
            self._show(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer)

    @override
    def on_exception(self, *args: Any) -> None:
        self._close(None)

    def _show(self, trainer: pl.Trainer | None) -> None:
        """Show the last step; without a trainer, as after an error of its device, old figures."""
        assert self._bar is not None, "there is a bar from `on_train_start` to `_close`"
        if trainer is not None:  # not at every step: to read figures is to wait for the device
            figures = _figures(trainer.progress_bar_metrics)
            self._bar.update(self._bar.task_ids[0], figures=figures)
        if self._bar.disable:
            print(_line(self._bar), flush=True)
        else:
            self._bar.refresh()
        self._shown_at, self._is_shown = time.monotonic(), True

    def _close(self, trainer: pl.Trainer | None) -> None:
        if self._bar is not None:
            if not self._is_shown:
                self._show(trainer)
            self._bar.stop()
            self._bar = None


def _line(bar: Progress) -> str:
    """Return what a file gets: the bar's columns without the bar."""
    [task] = bar.tasks
    times = [
        "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
        for seconds in (task.elapsed, task.time_remaining)
    ]
    return f"{_COUNT.format(task=task)}, {'<'.join(times)}, {task.fields['figures']}"


def _figures(metrics: Any) -> str:
    formats = {
        "train/loss": "loss {:.3f}",
        "val/loss": "val {:.3f}",
        "tokens/s": "{:,.0f} tokens/s",
        "kB/step": "{:,.1f} kB/step",
    }
    return ", ".join(text.format(metrics[key]) for key, text in formats.items() if key in metrics)
