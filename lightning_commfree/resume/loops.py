"""The moment at which a checkpoint was written, told to Lightning's loops.

Lightning restores the counters of its loops and concludes from them what is left to do; around the
end of an epoch it leaves something out or does it twice. Here the loops are set so that a resumed
fit does what the saved one did after the save:

===================================  ===============================================================
saved                                the resumed fit begins with
===================================  ===============================================================
after a batch, not the epoch's last  the validation that this batch was to bring, if it had not run;
                                     then the next batch
after the epoch's last batch         that validation, if it had not run; then the epoch's end
at the epoch's end, or before the    the next epoch
first batch of one
at the end of a fit that ended       the next batch of this epoch, which Lightning has counted as
within an epoch                      over: it is taken up again
===================================  ===============================================================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    count_step,
    data_fetcher,
    logged,
    restart_in_mid_epoch,
    step_at_epoch_end,
    validate_first,
)
from lightning_commfree.loop_counters import accumulates


class Moment(NamedTuple):
    """Where a resumed fit goes on."""

    epoch: int  # from 0
    batches: int  # of this epoch that have been trained on
    begun: bool  # this epoch has begun and is not over
    trained: bool  # of a begun epoch: only its end is left
    between: bool  # schedulers that watch a metric are still to be stepped for the latest batch


def restore_loops(trainer: pl.Trainer) -> Moment:
    """Let the fit go on at the moment of the save.

    Args:
        trainer: in `Strategy.on_train_start` of a resumed fit.
    """
    loop = trainer.fit_loop
    epochs, progress = loop.epoch_progress, loop.epoch_loop.batch_progress
    batch: Any = progress.current
    # in `on_train_batch_end`; a batch that was skipped is processed and never started
    in_hook = batch.started == batch.processed == batch.completed + 1
    trained = batch.processed >= trainer.num_training_batches or (
        progress.is_last_batch and batch.processed == batch.ready
    )
    begun, over = loop.restarted_mid_epoch or in_hook, 0
    if begun:
        # the one case in which `_FitLoop.reset` has already ended the epoch
        over = (
            loop.restarted_mid_epoch
            and loop.epoch_loop.restarted_on_train_batch_end
            and progress.is_last_batch
        )
    elif batch.processed and not trained:
        begun, over = True, 1

    epoch: Any = epochs.current
    if begun and not MID_EPOCH.works(trainer):  # as Lightning goes on
        return Moment(epoch.processed - over, batch.processed, begun, trained, between=False)
    total: Any = epochs.total
    for tracker in (total, epoch):
        tracker.processed -= over
        tracker.completed = tracker.processed
        tracker.ready = tracker.started = tracker.processed + begun
    between = False
    if begun:
        between = _go_on_after_batch(trainer, batch.processed, trained, in_hook)
    else:
        _begin_epoch(trainer)
    return Moment(epoch.processed, batch.processed, begun, trained, between)


def _begin_epoch(trainer: pl.Trainer) -> None:
    loop = trainer.fit_loop
    loop.on_iteration_done()
    loop.epoch_loop.reset_restart_stage()
    loop.epoch_loop.restarting = False  # of its children too


def _go_on_after_batch(trainer: pl.Trainer, batches: int, trained: bool, in_hook: bool) -> bool:
    """Go on after so many batches of an epoch.

    After `on_train_batch_end`, where a save may have been, follow the validation, if one is due,
    and the steps of schedulers that watch a metric.

    Returns:
        Whether these steps are left out: where no validation is due Lightning begins with the next
        batch.
    """
    restart_in_mid_epoch(trainer)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for name in ("ready", "started", "completed"):
        extra = getattr(progress.current, name) - batches
        setattr(progress.current, name, batches)
        setattr(progress.total, name, getattr(progress.total, name) - extra)
    progress.is_last_batch = trained
    if trained:  # the loop ends as it does when the data are used up
        fetcher = data_fetcher(trainer)
        fetcher.reset()
        fetcher.iterator, fetcher.done = iter(()), True
    if not in_hook:
        return False
    _warn_of_own_hook(trainer.lightning_module)
    if validate_first(trainer) or accumulates(trainer):
        return False
    count_step(trainer)
    return True


def _warn_of_own_hook(module: pl.LightningModule) -> None:
    if is_overridden("on_train_batch_end", module, pl.LightningModule):
        rank_zero_warn(
            "The checkpoint was written in `on_train_batch_end`, where callbacks come before"
            f" `{type(module).__name__}.on_train_batch_end`, and the resumed fit does not run that"
            " for this batch. If it changes what the training depends on, do so in `training_step`"
            " or `optimizer_step`, which come before the save."
        )


def watched_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what schedulers that watch a metric (`ReduceLROnPlateau`) need after a resume.

    Lightning leaves out their step at the end of a resumed epoch, for it does not save metrics.

    Returns:
        "values" by name; "open", names of means over an epoch that is not over, which cannot be
        restored; "due", whether the epoch is over and its step has not been taken. Empty without
        such a scheduler.
    """
    configs = trainer.lr_scheduler_configs
    watched = {str(config.monitor) for config in configs if config.reduce_on_plateau}
    if not watched:
        return {}
    epoch: Any = trainer.fit_loop.epoch_progress.current
    unfinished: set[str] = set()
    if epoch.processed < epoch.ready:
        open_metrics = [metric for metric in logged(trainer) if not metric.has_reset]
        metas = [metric.meta for metric in open_metrics if metric.meta.on_epoch]
        unfinished = {name for meta in metas for name in (meta.name, meta.forked_name(False))}
    metrics = trainer.callback_metrics
    return {
        "values": {
            name: metrics[name].detach().cpu().clone()
            for name in sorted(watched & metrics.keys() - unfinished)
        },
        "open": sorted(watched & unfinished),
        "due": epoch.completed < epoch.processed == epoch.ready,
    }


def restore_watched(trainer: pl.Trainer, watched: dict[str, Any], moment: Moment) -> None:
    """Give back what `watched_metrics` returned, and take the steps that were due after the save.

    Args:
        trainer: its loops and schedulers are restored.
        watched: of the save.
        moment: where the fit goes on.
    """
    if not watched:
        return
    loop = trainer.fit_loop
    trainer.callback_metrics.update(watched["values"])
    if moment.between:
        loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if moment.begun and watched["open"]:
        rank_zero_warn(
            f"A learning-rate scheduler watches {', '.join(map(repr, watched['open']))}, a mean"
            " over an epoch in the middle of which the checkpoint was written. Lightning does not"
            " keep its first part, so the scheduler leaves out the end of this epoch, and the fit"
            " may differ from an uninterrupted one from there on."
        )
    elif moment.begun:
        step_at_epoch_end(trainer)
    elif watched["due"]:
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
