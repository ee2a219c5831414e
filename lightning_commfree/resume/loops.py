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

import inspect
from typing import Any, NamedTuple, cast

from lightning_commfree.host import callbacks, is_overridden, pl
from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    accumulates,
    count_step,
    data_fetcher,
    restart_in_mid_epoch,
    set_step,
    validate_first,
)
from lightning_commfree.resume.loader_parts import is_known, name_of


class Moment(NamedTuple):
    """The point in a fit where a checkpoint was saved, and where a resumed fit continues."""

    epoch: int  # counted from 0
    batches: int  # number of batches of this epoch that have been trained on
    begun: bool  # whether this epoch has begun and is not over
    all_trained: bool  # whether all batches of this epoch are trained on; only its end is left
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
    all_trained = batch.processed >= trainer.num_training_batches or (
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
    elif batch.processed and not all_trained:
        begun, over = True, 1

    epoch: Any = epochs.current
    if begun and not MID_EPOCH.works(trainer):  # leave the loops to Lightning
        return Moment(epoch.processed - over, batch.processed, begun, all_trained, in_hook)
    total: Any = epochs.total
    for tracker in (total, epoch):
        tracker.processed -= over
        tracker.completed = tracker.processed
        tracker.ready = tracker.started = tracker.processed + begun
    if begun:
        _continue_after_batch(trainer, batch.processed, all_trained, in_hook)
    else:
        loop.on_iteration_done()
        loop.epoch_loop.reset_restart_stage()
        loop.epoch_loop.restarting = False  # the setter does the same for its child loops
    return Moment(epoch.processed, batch.processed, begun, all_trained, in_hook)


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
        _continue_after_batch(trainer, batches, all_trained=False, in_hook=False)


def _continue_after_batch(
    trainer: pl.Trainer, batches: int, all_trained: bool, in_hook: bool
) -> None:
    """Make Lightning's loops continue an epoch after its first `batches` batches.

    For `all_trained` and `in_hook`, see `Moment`.
    """
    restart_in_mid_epoch(trainer)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for name in ("ready", "started", "completed"):
        extra = getattr(progress.current, name) - batches
        setattr(progress.current, name, batches)
        setattr(progress.total, name, getattr(progress.total, name) - extra)
    progress.is_last_batch = all_trained

    if all_trained:  # an exhausted fetcher makes the loop end the epoch
        fetcher = data_fetcher(trainer)
        fetcher.reset()
        fetcher.iterator, fetcher.done = iter(()), True

    # A validation may be due right after a save in `on_train_batch_end`. If one is, Lightning runs
    # the rest of its end-of-batch code and counts the step itself.
    if in_hook and not validate_first(trainer) and not accumulates(trainer):
        count_step(trainer)


# Hooks after which a resumed fit continues, without running the rest of them: what they end, and
# where a module can put code that training depends on.
_NOT_REPEATED = {
    "on_train_batch_end": ("batch", "`training_step` or `optimizer_step`"),
    "on_validation_end": ("validation", "`on_validation_epoch_end`"),
    "on_train_epoch_end": ("epoch", "`on_train_epoch_start`"),
}


def skipped_hooks(trainer: pl.Trainer) -> list[str]:
    """Return messages about hooks that would not run after a resume from a save made now.

    Lightning runs a hook of all callbacks in their order, then of the module. If a callback saves
    in the hook, those after it have not run it yet, and a resumed fit continues after the hook.
    """
    hook, saver = _running_hook(trainer)
    if hook not in _NOT_REPEATED:
        return []
    last, instead = _NOT_REPEATED[hook]
    when = f"does not run for the last {last} before the save"
    texts = [
        f"`{type(callback).__name__}.{hook}` {when}, because the callback that saves comes before"
        " it. Derive that one from `Checkpoint`: Lightning runs such callbacks last"
        for callback in _callbacks_after(trainer, saver, hook)
    ]
    module = trainer.lightning_module
    if _module_is_after(saver, hook) and is_overridden(hook, module, pl.LightningModule):
        texts.append(
            f"`{type(module).__name__}.{hook}` {when}: a callback saved in its own `{hook}`, which"
            f" runs before the module's. Put code that training depends on into {instead}"
        )
    return texts


def _running_hook(trainer: pl.Trainer) -> tuple[str, Any]:
    """Return the name of the hook that is running, and the callback or module that runs it.

    Both are found in the stack, because Lightning does not record which callback is running. If
    they are not found there, the name is "", or in `on_train_batch_end` the callback is None.
    """
    found: tuple[str, Any] = ("", None)
    frame = inspect.currentframe()
    owners = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    while frame is not None:  # the outermost one, in case a hook calls another one
        name = frame.f_code.co_name
        if name.startswith("on_") and any(frame.f_locals.get("self") is one for one in owners):
            found = name, frame.f_locals["self"]
        frame = frame.f_back
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    in_batch_end = batch.started == batch.processed == batch.completed + 1
    return ("on_train_batch_end", None) if in_batch_end and found[0] not in _NOT_REPEATED else found


def _callbacks_after(trainer: pl.Trainer, saver: Any, hook: str) -> list[Any]:
    """Return the callbacks that run a hook after the callback `saver` and may have state."""
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if hook == "on_train_epoch_end":
        every = sorted(every, key=_monitors)
    if saver is trainer.lightning_module:
        every = [one for one in every if hook == "on_train_epoch_end" and _monitors(one)]
    elif saver is not None:
        place = next(i for i, one in enumerate(every) if one is saver)
        every = every[place + 1 :]
    return [one for one in every if is_overridden(hook, one, pl.Callback) and _has_state(one)]


def _monitors(callback: Any) -> bool:
    """Return whether Lightning runs a callback's `on_train_epoch_end` after the module's."""
    return isinstance(callback, callbacks.EarlyStopping | callbacks.Checkpoint)


def _module_is_after(saver: Any, hook: str) -> bool:
    """Return whether the module's `hook` runs after that of the callback `saver`."""
    is_callback = saver is None or isinstance(saver, pl.Callback)
    return is_callback and not (hook == "on_train_epoch_end" and _monitors(saver))


def _has_state(callback: Any) -> bool:
    """Return whether a callback may have state; progress bars, monitors and clocks have none."""
    if not is_known(callback) or isinstance(callback, callbacks.LambdaCallback):
        return True
    is_idle = isinstance(callback, callbacks.Checkpoint | callbacks.Timer)
    return is_overridden("state_dict", callback, pl.Callback) and not is_idle


def unknown_parts_of_fit(trainer: pl.Trainer, moment: Moment) -> list[str]:
    """Return descriptions of optimizers, hooks and data whose state may not be complete."""
    module, data = trainer.lightning_module, cast(Any, trainer).datamodule
    found = [f"optimizer {name_of(one)}" for one in trainer.optimizers if not is_known(one)]
    if moment.begun and is_overridden("on_train_epoch_start", module, pl.LightningModule):
        found.append(
            f"what `{type(module).__name__}.on_train_epoch_start` has set, which does not run again"
            " in the middle of an epoch"
        )
    if data is not None and cast(Any, trainer).reload_dataloaders_every_n_epochs:
        found.append(f"data module {name_of(data)}")
    return found


def unknown_callbacks(trainer: pl.Trainer) -> list[str]:
    """Return descriptions of callbacks whose state may be incomplete: those of other packages."""
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        f"callback {name_of(one)}"
        for one in every
        if not is_known(one) or isinstance(one, callbacks.LambdaCallback)
    ]
