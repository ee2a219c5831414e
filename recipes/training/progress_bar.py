"""A progress bar over the optimizer steps of the whole run."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

_LOG_FILE_SECONDS = 10.0
_BAR = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
_LINE = "step {n_fmt}/{total_fmt}, {elapsed}<{remaining}{postfix}"


class StepProgressBar(ProgressBar):
    """Optimizer steps done, loss, tokens per second and kB sent per step, on rank 0.

    Lightning's own bars count the batches of an epoch, and a run's length is given in steps here.
    Into a file, where a bar cannot move, a line is written every ten seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: tqdm | None = None

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        moves = sys.stdout.isatty()
        self._bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            bar_format=(_BAR if moves else _LINE),
            disable=not self._enabled,
            dynamic_ncols=moves,
            mininterval=0.2 if moves else _LOG_FILE_SECONDS,
            file=sys.stdout,
        )

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        assert self._bar is not None, "the bar is made in `on_train_start`"
        metrics = trainer.progress_bar_metrics
        if trainer.global_step > self._bar.n:
            self._bar.set_postfix_str(_figures(metrics), refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, *args: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _figures(metrics: Any) -> str:
    formats = {
        "train/loss": "loss {:.3f}",
        "val/loss": "val {:.3f}",
        "tokens/s": "{:,.0f} tokens/s",
        "kB/step": "{:,.1f} kB/step",
    }
    return ", ".join(text.format(metrics[key]) for key, text in formats.items() if key in metrics)
