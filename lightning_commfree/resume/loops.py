"""Restore Lightning's loops to the state that they had when a checkpoint was saved.

Lightning restores its loops' counters and derives the remaining work from them. Near the end of an
epoch, this makes it skip or repeat steps. This module corrects the loops, so that a resumed fit
continues exactly as the original fit did after the save:

===================================  ===============================================================
checkpoint saved                     resumed fit begins with
===================================  ===============================================================
after a batch, not the epoch's last  the validation due after this batch, if it had not run; then
                                     the next batch
after the epoch's last batch         that validation, if it had not run; then the epoch's end
at the epoch's end, or before the    the next epoch
first batch of an epoch
at the end of a fit that ended       the next batch of that epoch, although Lightning counted the
within an epoch                      epoch as finished
===================================  ===============================================================
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_commfree.host import is_overridden, pl
from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    accumulates,
    count_step,
    data_fetcher,
    restart_in_mid_epoch,
    set_step,
    validate_first,
)


class Moment(NamedTuple):
    """The point in a fit where a checkpoint was saved, and where a resumed fit continues."""

    epoch: int  # counted from 0
    batches: int  # number of batches of this epoch that have been trained on
    begun: bool  # whether this epoch has begun and is not over
    trained: bool  # whether all batches of this epoch have been trained on; only its end is left
    in_hook: bool  # whether the checkpoint was saved in `on_train_batch_end`


def restore_loops(trainer: pl.Trainer) -> Moment:
    """Make Lightning's loops continue where the checkpoint was saved; return that point.

    Call this in `on_train_start`, after Lightning has loaded the checkpoint's loop counters.
    """
    loop = trainer.fit_loop
    epochs, progress = loop.epoch_progress, loop.epoch_loop.batch_progress
    batch: Any = progress.current
    # in `on_train_batch_end` the batch is not completed yet; a skipped batch is never started
    in_hook = batch.started == batch.processed == batch.completed + 1
    trained = batch.processed >= trainer.num_training_batches or (
        progress.is_last_batch and batch.processed == batch.ready
    )
    begun, over = loop.restarted_mid_epoch or in_hook, 0
    if begun:
        # the only case in which Lightning's `_FitLoop.reset` has already ended the epoch
        over = (
            loop.restarted_mid_epoch
            and loop.epoch_loop.restarted_on_train_batch_end
            and progress.is_last_batch
        )
    elif batch.processed and not trained:
        begun, over = True, 1

    epoch: Any = epochs.current
    if begun and not MID_EPOCH.works(trainer):  # leave the loops to Lightning
        return Moment(epoch.processed - over, batch.processed, begun, trained, in_hook)
    total: Any = epochs.total
    for tracker in (total, epoch):
        tracker.processed -= over
        tracker.completed = tracker.processed
        tracker.ready = tracker.started = tracker.processed + begun
    if begun:
        _continue_after_batch(trainer, batch.processed, trained, in_hook)
    else:
        loop.on_iteration_done()
        loop.epoch_loop.reset_restart_stage()
        loop.epoch_loop.restarting = False  # the setter does the same for its child loops
    return Moment(epoch.processed, batch.processed, begun, trained, in_hook)


def start_in_epoch(trainer: pl.Trainer, step: int, epoch: int, batches: int) -> None:
    """Make Lightning's loops start at `step`, after the first `batches` batches of `epoch`.

    Call this in `on_train_start`.
    """
    set_step(trainer, step)
    loop = trainer.fit_loop
    progress: Any = loop.epoch_loop.batch_progress
    before = epoch * int(trainer.num_training_batches)
    for tracker, count in ((progress.total, before + batches), (progress.current, batches)):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = count
    epochs: Any = loop.epoch_progress
    for tracker in (epochs.total, epochs.current):
        tracker.processed = tracker.completed = epoch
        tracker.ready = tracker.started = epoch + bool(batches)
    loop.restarting = loop.epoch_loop.restarting = False
    if batches:
        _continue_after_batch(trainer, batches, trained=False, in_hook=False)


def _continue_after_batch(trainer: pl.Trainer, batches: int, trained: bool, in_hook: bool) -> None:
    """Make Lightning's loops continue an epoch after its first `batches` batches.

    For `trained` and `in_hook`, see `Moment`.
    """
    restart_in_mid_epoch(trainer)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for name in ("ready", "started", "completed"):
        extra = getattr(progress.current, name) - batches
        setattr(progress.current, name, batches)
        setattr(progress.total, name, getattr(progress.total, name) - extra)
    progress.is_last_batch = trained

    if trained:  # an exhausted fetcher makes the loop end the epoch
        fetcher = data_fetcher(trainer)
        fetcher.reset()
        fetcher.iterator, fetcher.done = iter(()), True

    # A validation may be due right after a save in `on_train_batch_end`. If one is, Lightning runs
    # the rest of its end-of-batch code and counts the step itself.
    if in_hook and not validate_first(trainer) and not accumulates(trainer):
        count_step(trainer)


def skipped_hooks(trainer: pl.Trainer, moment: Moment) -> list[str]:
    """Return messages about hooks that ran after the save but will not run after a resume."""
    texts, module = [], trainer.lightning_module
    if moment.in_hook and is_overridden("on_train_batch_end", module, pl.LightningModule):
        texts.append(
            f"`{type(module).__name__}.on_train_batch_end` does not run for the last batch before"
            " the save: a callback saved in its own `on_train_batch_end`, which runs before the"
            " module's. Put code that training depends on into `training_step` or `optimizer_step`"
        )
    return texts
