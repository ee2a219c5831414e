"""A progress bar over the optimizer steps of the whole run; lines in a file."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from recipes import stages

_TERMINAL_S = 0.2
_LOG_FILE_S = 10.0
_COUNT = "step {task.completed:,.0f}/{task.total:,.0f}"
_FORMATS = {  # the most important first: the last ones do not fit on a narrow terminal
    "train/loss": "loss {:.3f}",
    "val/loss": "val {:.3f}",
    "tokens/s": "{:,.0f} tokens/s",
    "kB/step": "{:,.1f} kB/step",
}


class StepProgressBar(ProgressBar):
    """Show steps, loss, tokens per second and kB sent per step, on rank 0.

    Lightning's own bars count the batches of an epoch, but here the length of a run is in steps.
    Into a file they print nothing or one endless line, this one prints a line every ten seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None  # during the fit, on rank 0
        self._figures = ""
        self._shown_step = 0
        self._shown_at = 0.0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # disables it on all ranks but the first
        save = trainer.save_checkpoint

        def save_and_show(filepath: Any, *args: Any, **kwargs: Any) -> None:
            doing = f"saving {os.path.basename(filepath)}"
            self._show_on_terminal(doing)
            with stages.stage(doing, shown=self._enabled and not self._moves):
                save(filepath, *args, **kwargs)
            self._show_on_terminal(self._figures)

        # callbacks have a hook before a checkpoint is written, but none after it
        trainer.save_checkpoint = save_and_show  # type: ignore[method-assign]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled:
            return
        console = Console()
        whole = Column(no_wrap=True, overflow="ignore")
        self._bar = Progress(
            TextColumn(_COUNT, markup=False, table_column=whole),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TimeElapsedColumn(table_column=whole.copy()),
            TimeRemainingColumn(table_column=whole.copy()),
            _Figures(),
            console=console,
            auto_refresh=False,  # a refreshing thread would write between the output of others
            disable=not console.is_terminal,
            expand=True,
        )
        step = self._shown_step = trainer.global_step
        self._bar.add_task("", total=trainer.max_steps, completed=step, figures="")
        self._bar.start()
        self._shown_at = time.monotonic()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._bar is not None and trainer.global_step > self._bar.tasks[0].completed:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
            if self._is_due():
                self._show_step(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_on_terminal("validating")

    @override
    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self._bar is not None and self._is_due():
            batches = sum(trainer.num_val_batches)
            self._show(f"validating, {batch_idx + 1:,} of {batches:,.0f}")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_on_terminal(self._figures)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None and trainer.global_step > self._shown_step:
            self._show_step(trainer)
        self._close()

    @override
    def on_exception(self, *args: Any) -> None:
        self._close()

    @property
    def _moves(self) -> bool:
        """Whether there is a bar on a terminal."""
        return self._bar is not None and not self._bar.disable

    def _is_due(self) -> bool:
        every = _TERMINAL_S if self._moves else _LOG_FILE_S
        return time.monotonic() - self._shown_at >= every

    def _show_step(self, trainer: pl.Trainer) -> None:
        # not at every step: reading metrics waits for the device
        metrics = trainer.progress_bar_metrics
        found = [text.format(metrics[key]) for key, text in _FORMATS.items() if key in metrics]
        self._figures, self._shown_step = ", ".join(found), trainer.global_step
        self._show(self._figures)

    def _show_on_terminal(self, text: str) -> None:
        """Show a text at once on a terminal; not in a file."""
        if self._moves:
            self._show(text)

    def _show(self, text: str) -> None:
        assert self._bar is not None, "there is a bar from `on_train_start` to `_close`"
        self._bar.update(self._bar.task_ids[0], figures=text)
        if self._moves:
            self._bar.refresh()
        else:
            [task] = self._bar.tasks
            times = f"{_duration(task.elapsed)}<{_duration(task.time_remaining)}"
            print(f"{_COUNT.format(task=task)}, {times}, {text}", flush=True)
        self._shown_at = time.monotonic()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Figures(ProgressColumn):
    """The only column that a narrow terminal cuts."""

    @override
    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


def _duration(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
