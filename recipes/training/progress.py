"""Log the speed and traffic of a run, and keep its history for the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import Throughput, measure_flops
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_commfree import ElasticDiLoCoStrategy
from recipes.data.training_data import TrainingData
from recipes.training.elastic import reading_all_rows
from recipes.training.language_model import Batch, LanguageModel
from recipes.training.traffic import TrafficMeter, ddp_start_bytes

_WINDOW = 21  # ends of batches; 20 batches lie between the first and the last
_POINTS = 20  # of a curve, at least


@dataclass
class History:
    """Data for the figure of a run, independent of its loggers."""

    first_step: int = 0  # optimizer steps before this fit; above 0 when it was resumed
    tokens_per_step: int = 0  # of all ranks
    steps: list[int] = field(default_factory=list)  # at which the next four were recorded
    seconds: list[float] = field(default_factory=list)  # since the first batch, all included
    train_loss: list[float] = field(default_factory=list)  # this rank's, nats per token
    bytes_sent: list[int] = field(default_factory=list)  # by this rank's steps of this fit
    seconds_waited: list[float | None] = field(default_factory=list)  # None: nobody counts
    validation_steps: list[int] = field(default_factory=list)
    validation_seconds: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)  # of all ranks, nats per token


class RunRecorder(pl.Callback):
    """Callback that logs tokens per second and bytes sent, and keeps the history of the run.

    `tokens/s` counts all ranks together and is a mean over the last 20 batches, reading included
    and validation left out. `mfu` is the share of a GPU's peak that the model's own arithmetic
    takes, on GPUs whose peak Lightning knows. `comm/bytes_sent` is what this rank's training steps
    have sent so far. The progress bar shows `kB/step`, the strategy's `comm/bytes_per_step`.

    Speed is computed by Lightning's `Throughput`, and not by its `ThroughputMonitor`: that callback
    multiplies by the number of ranks, and ranks that share one model read the same tokens; and it
    tells loggers alone, not the progress bar.

    Args:
        data: the run's data.

    Attributes:
        history: every `log_every_n_steps` optimizer steps, more often in a short run, so that its
            curves have `_POINTS` points or more; and every validation.
        meter: what this rank will send and has sent; from `on_fit_start` on.
        num_parameters: of the whole model; from `setup` on, as the next one.
        num_trained: those of them that are trained.
        steps_done: optimizer steps of this fit so far.
    """

    meter: TrafficMeter
    num_parameters: int
    num_trained: int

    def __init__(self, data: TrainingData) -> None:
        self.history = History()
        self._data = data
        self._throughput = Throughput(window_size=_WINDOW)
        self._flops: int | None = None  # of this rank in a micro-batch; None: the peak is unknown
        self.steps_done = 0
        self._step = 0  # `global_step` after the last one
        self._batches = 0
        self._train_start = 0.0
        self._validation_start = 0.0
        self._seconds_validated = 0.0
        self._ddp_start_bytes = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # a strategy may divide the model before the fit starts
        self.num_parameters = sum(p.numel() for p in pl_module.parameters())
        self.num_trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        self._ddp_start_bytes = ddp_start_bytes(pl_module, trainer.world_size)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tokens = self._data.batch_size * self._data.tokens_per_row()
        self.meter = TrafficMeter(trainer, tokens, self._ddp_start_bytes)
        monitor = ThroughputMonitor(batch_size_fn=len)
        monitor.setup(trainer, pl_module, "fit")  # looks up the GPU's peak for this precision
        self._throughput = Throughput(available_flops=monitor.available_flops, window_size=_WINDOW)
        if monitor.available_flops is not None:
            assert isinstance(pl_module, LanguageModel), "the recorder counts a LanguageModel"
            flops = flops_per_batch(pl_module, self._data.batch_size, self._data.tokens_per_row())
            self._flops = flops * self.num_shares(trainer) // trainer.world_size

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.history = History(trainer.global_step, self.tokens_per_step(trainer))
        self.steps_done, self._step = 0, trainer.global_step
        self._batches = 0
        self._seconds_validated = 0.0
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
        speed = self._speed()
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._count_step(trainer.global_step)
        steps = self.steps_done
        # where a row is due, and in the first step for the progress bar; `log` takes its time
        due = every > 0 and (trainer.global_step % every == 0 or steps == 1)
        if due and "device/items_per_sec" in speed:  # there is a whole window
            rate = speed["device/items_per_sec"] * self.num_shares(trainer)
            pl_module.log("tokens/s", rate, prog_bar=True)
        if due and "device/mfu" in speed:
            pl_module.log("mfu", speed["device/mfu"])
        if due and steps > 0:
            pl_module.log("comm/bytes_sent", float(self.meter.bytes_in_steps(steps)))
            per_step = self.meter.bytes_per_step()
            pl_module.log("kB/step", per_step / 1000, prog_bar=True, logger=False)
        if steps > 0:
            self._remember(trainer, every, cast(dict[str, Tensor], outputs)["loss"])

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_start = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds_validated += time.monotonic() - self._validation_start
        if not trainer.sanity_checking:
            self.history.validation_steps.append(trainer.global_step)
            self.history.validation_seconds.append(time.monotonic() - self._train_start)
            self.history.validation_loss.append(float(trainer.callback_metrics["val/loss"]))

    def num_shares(self, trainer: pl.Trainer) -> int:
        """Return the number of shares of the rows: one per rank, or per tensor-parallel group."""
        if isinstance(trainer.strategy, ElasticDiLoCoStrategy):
            with reading_all_rows(trainer):  # of this replica: nobody knows how many others train
                shares = trainer.distributed_sampler_kwargs
        else:
            shares = trainer.distributed_sampler_kwargs
        return int(shares["num_replicas"]) if shares else 1

    def tokens_per_batch(self, trainer: pl.Trainer) -> int:
        """Return the tokens that all ranks together train on in one micro-batch."""
        return self.num_shares(trainer) * self._data.batch_size * self._data.tokens_per_row()

    def tokens_per_step(self, trainer: pl.Trainer) -> int:
        """Return the tokens that all ranks together train on in one optimizer step."""
        return self.tokens_per_batch(trainer) * trainer.accumulate_grad_batches

    def _count_step(self, step: int) -> None:
        """Count an optimizer step if `step`, the Trainer's `global_step`, is new.

        An elastic replica begins at the job's step instead of 0, and may skip steps if it is late.
        """
        if step > self._step:
            if self.steps_done == 0:
                self.history.first_step = step - 1
            self.steps_done += 1
            self._step = step

    def _speed(self) -> dict[str, float]:
        """Count another micro-batch; return `Throughput`'s metrics of this rank's last 20."""
        self._batches += 1
        samples = self._batches * self._data.batch_size
        self._throughput.update(
            time=time.monotonic() - self._train_start - self._seconds_validated,
            batches=self._batches,
            samples=samples,
            lengths=samples * self._data.tokens_per_row(),
            flops=self._flops,
        )
        return self._throughput.compute()

    def _remember(self, trainer: pl.Trainer, every: int, share: Tensor) -> None:
        """Append a point to the history if one is due; `share` is the loss passed to backward."""
        history, step = self.history, trainer.global_step
        if trainer.max_steps > 0:
            every = min(every, max((trainer.max_steps - history.first_step) // _POINTS, 1))
        # a micro-batch that only accumulates ends without a new step; the first step opens the
        # curve
        is_new = not history.steps or step > history.steps[-1]
        if is_new and (not history.steps or (every > 0 and step % every == 0)):
            history.steps.append(step)
            history.seconds.append(time.monotonic() - self._train_start)
            history.seconds_waited.append(self.meter.seconds_waited())
            history.train_loss.append(float(share) * trainer.accumulate_grad_batches)
            history.bytes_sent.append(self.meter.bytes_in_steps(self.steps_done))


def flops_per_batch(module: LanguageModel, batch_size: int, block_size: int) -> int:
    """Return the floating-point operations of a micro-batch, forward and backward.

    Counted on a copy of shapes only, as it is before a strategy divides it; what gradient
    checkpointing computes again is not counted, for it is no progress.

    Args:
        module: whose model it is.
        batch_size: rows.
        block_size: tokens that are foretold in a row.
    """
    with torch.device("meta"):
        copy = LanguageModel(**module.hparams)
        tokens = torch.zeros(batch_size, block_size, dtype=torch.int64)
        # without a mask of this shape transformers would look at values, of which there are none
        mask = torch.ones(batch_size, 1, block_size, block_size, dtype=torch.bool)
    batch: Batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    return measure_flops(copy, lambda: copy.loss(batch), lambda loss: loss)
