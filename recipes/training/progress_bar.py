"""A progress bar over the optimizer steps of the whole run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from typing_extensions import override

from recipes.stages import stage

_TERMINAL_SECONDS = 0.2
_LOG_FILE_SECONDS = 10.0
_COUNT = "step {task.completed:,.0f}/{task.total:,.0f}"
_NARROWEST_BAR = 4
_TIMES = 2 * len("-:--:--")
_GAPS = 4  # between five columns


class StepProgressBar(ProgressBar):
    """Optimizer steps done, loss, tokens per second and kB sent per step, on rank 0.

    Lightning's own bars count the batches of an epoch, and a run's length is given in steps here.
    Into a file, where a bar cannot move, a line is written every ten seconds. A terminal that is
    too narrow for all figures gets those that fit: times and figures are never cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._figures = ""  # of the last step that was shown
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
        whole = Column(no_wrap=True, overflow="ignore")
        columns = (
            TextColumn(_COUNT, markup=False, table_column=whole),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TimeElapsedColumn(table_column=whole.copy()),
            TimeRemainingColumn(table_column=whole.copy()),
            TextColumn("{task.fields[figures]}", markup=False, table_column=whole.copy()),
        )
        # `auto_refresh` would refresh from a thread of its own, between what others print
        self._bar = Progress(
            *columns,
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
            expand=True,
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
        if time.monotonic() - self._shown_at >= self._every():
            self._show(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say("validating")

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._bar is not None and time.monotonic() - self._shown_at >= self._every():
            self._say(f"validating, {batch_idx + 1:,} of {sum(trainer.num_val_batches):,.0f}")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say(self._figures)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # disables it on all ranks but the first
        save = trainer.save_checkpoint

        def save_and_say(filepath: Any, *args: Any, **kwargs: Any) -> None:
            with self._saving(os.path.basename(filepath)):
                save(filepath, *args, **kwargs)

        # the hook of callbacks comes before a file is written, and none comes after it
        trainer.save_checkpoint = save_and_say  # type: ignore[method-assign]

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
            self._figures = _figures(trainer.progress_bar_metrics, self._room())
            self._bar.update(self._bar.task_ids[0], figures=self._figures)
        if self._bar.disable:
            print(_line(self._bar), flush=True)
        else:
            self._bar.refresh()
        self._shown_at, self._is_shown = time.monotonic(), True

    def _say(self, what: str) -> None:
        """Show a text in place of the figures, between two steps."""
        if self._bar is None or (self._bar.disable and what == self._figures):
            return
        now = time.monotonic()
        if self._bar.disable and now - self._shown_at < _LOG_FILE_SECONDS:
            return
        self._bar.update(self._bar.task_ids[0], figures=what[: self._room()])
        if self._bar.disable:
            print(_line(self._bar), flush=True)
        else:
            self._bar.refresh()
        self._shown_at = now

    @contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        on_terminal = self._bar is not None and not self._bar.disable
        if on_terminal:
            self._say(f"saving {name}")
        with stage(f"saving {name}", shown=self._enabled and not on_terminal):
            yield
        if on_terminal:
            self._say(self._figures)

    def _every(self) -> float:
        assert self._bar is not None, "there is a bar from `on_train_start` to `_close`"
        return _LOG_FILE_SECONDS if self._bar.disable else _TERMINAL_SECONDS

    def _room(self) -> int:
        """Return how many letters of figures fit beside count, bar and times."""
        assert self._bar is not None, "there is a bar from `on_train_start` to `_close`"
        if self._bar.disable:
            return 1_000  # a file has no width
        count = len("step /") + 2 * len(f"{self._bar.tasks[0].total:,.0f}")
        return self._bar.console.width - count - _NARROWEST_BAR - _TIMES - _GAPS

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


def _figures(metrics: Any, room: int) -> str:
    """Return as many figures as fit, the most important ones first."""
    formats = {
        "train/loss": "loss {:.3f}",
        "val/loss": "val {:.3f}",
        "tokens/s": "{:,.0f} tokens/s",
        "kB/step": "{:,.1f} kB/step",
    }
    found = [text.format(metrics[key]) for key, text in formats.items() if key in metrics]
    while found and len(", ".join(found)) > room:
        found.pop()
    return ", ".join(found)
