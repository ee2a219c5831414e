"""Where Lightning's fit loop stands, read from what it counts."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl


def data_used_up(trainer: pl.Trainer) -> bool:
    """Return whether the latest batch that was read is the epoch's last one."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.is_last_batch or progress.current.ready >= trainer.num_training_batches


def may_stop_early(trainer: pl.Trainer, in_step: bool = False) -> bool:
    """Return whether `min_epochs` and `min_steps` are reached.

    Args:
        trainer: in its fit.
        in_step: an optimizer step runs, which the Trainer has not counted yet.
    """
    loop, steps = trainer.fit_loop, trainer.global_step + in_step
    epoch: Any = loop.epoch_progress.current
    return epoch.processed >= (loop.min_epochs or 0) and steps >= (loop.min_steps or 0)


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether the latest batch that was read brings no optimizer step."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and not data_used_up(trainer)


def steps_to_come(trainer: pl.Trainer) -> int | None:
    """Return how many optimizer steps its fit still takes; None where nobody knows."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 0:
        return None
    return max(int(total) - trainer.global_step, 0)


def in_accumulation(trainer: pl.Trainer) -> bool:
    """Return whether there are gradients of batches whose optimizer step is still to come."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    stepped = batch.processed == batch.ready and not accumulates(trainer)
    return not stepped and bool(batch.processed % trainer.accumulate_grad_batches)
