"""A run while it runs: speed and traffic for the loggers, a history for the report."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from recipes.data.training_data import TrainingData
from recipes.training.traffic import TrafficMeter

_WINDOW_BATCHES = 20


@dataclass
class History:
    """What the figure of a run shows, whatever the loggers make of it."""

    first_step: int = 0  # optimizer steps before this fit; above 0 when it was resumed
    tokens_per_step: int = 0  # of all ranks
    steps: list[int] = field(default_factory=list)  # at which the next four were recorded
    seconds: list[float] = field(default_factory=list)  # since the first batch, all included
    train_loss: list[float] = field(default_factory=list)  # this rank's, nats per token
    bytes_sent: list[int] = field(default_factory=list)  # by this rank since the start of this fit
    seconds_waited: list[float | None] = field(default_factory=list)  # None: nobody counts
    validation_steps: list[int] = field(default_factory=list)
    validation_seconds: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)  # of all ranks, nats per token


class RunRecorder(pl.Callback):
    """Logs tokens per second and bytes sent, and keeps the history of the run.

    `tokens/s` counts all ranks together and is a mean over the last 20 batches, reading included
    and validation left out. `comm/bytes_sent` is this rank's sum so far. The progress bar shows
    `kB/step`, its mean per optimizer step.

    Args:
        data: the run's data.

    Attributes:
        history: every `log_every_n_steps` optimizer steps, and every validation.
        meter: what this rank will send and has sent; from `on_fit_start` on.
    """

    meter: TrafficMeter

    def __init__(self, data: TrainingData) -> None:
        self.history = History()
        self._data = data
        self._batch_ends: deque[float] = deque(maxlen=_WINDOW_BATCHES + 1)
        self._train_start = 0.0
        self._validation_start = 0.0

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tokens = self._data.batch_size * self._data.block_size
        self.meter = TrafficMeter(trainer, tokens)
        self._batch_ends.clear()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.history = History(trainer.global_step, self.tokens_per_step(trainer))
        self._train_start = time.monotonic()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._batch_ends.append(time.monotonic())
        batches = len(self._batch_ends) - 1
        if batches > 0:
            seconds = self._batch_ends[-1] - self._batch_ends[0]
            rate = batches * self.tokens_per_batch(trainer) / max(seconds, 1e-9)
            pl_module.log("tokens/s", rate, prog_bar=True)
        steps = self.steps_done(trainer)
        if steps > 0:
            sent = self.meter.bytes_sent(steps)
            pl_module.log("comm/bytes_sent", float(sent))
            pl_module.log("kB/step", sent / steps / 1000, prog_bar=True, logger=False)
            loss = float(cast(dict[str, Tensor], outputs)["loss"])
            self._remember(trainer.global_step, trainer.log_every_n_steps, loss)  # type: ignore[attr-defined]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_start = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        paused = time.monotonic() - self._validation_start
        self._batch_ends = deque((t + paused for t in self._batch_ends), _WINDOW_BATCHES + 1)
        if not trainer.sanity_checking:
            self.history.validation_steps.append(trainer.global_step)
            self.history.validation_seconds.append(time.monotonic() - self._train_start)
            self.history.validation_loss.append(float(trainer.callback_metrics["val/loss"]))

    def steps_done(self, trainer: pl.Trainer) -> int:
        """Return the optimizer steps of this fit so far."""
        return trainer.global_step - self.history.first_step

    def tokens_per_batch(self, trainer: pl.Trainer) -> int:
        """Return the tokens that all ranks together train on in one micro-batch."""
        shares = trainer.distributed_sampler_kwargs
        num_shares = shares["num_replicas"] if shares else 1
        return num_shares * self._data.batch_size * self._data.block_size

    def tokens_per_step(self, trainer: pl.Trainer) -> int:
        """Return the tokens that all ranks together train on in one optimizer step."""
        return self.tokens_per_batch(trainer) * trainer.accumulate_grad_batches

    def _remember(self, step: int, every: int, train_loss: float) -> None:
        history = self.history
        # a micro-batch that only accumulates ends without a new step; the first step opens the
        # curve
        is_new = not history.steps or step > history.steps[-1]
        if is_new and (step % every == 0 or not history.steps):
            history.steps.append(step)
            history.seconds.append(time.monotonic() - self._train_start)
            history.seconds_waited.append(self.meter.seconds_waited())
            history.train_loss.append(train_loss)
            history.bytes_sent.append(self.meter.bytes_sent(step - history.first_step))
