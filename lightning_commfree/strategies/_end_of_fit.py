"""Is this fit about to end?

Lightning decides it in nested loops; here is the same decision at one moment.
`Strategy.on_train_end` is the last hook of a fit: callbacks have validated and written their last
checkpoint by then. What must be in that checkpoint has to happen before, so the end is foreseen
wherever it can be.
"""

from __future__ import annotations

from typing import cast

import lightning.pytorch as pl
from lightning.pytorch.loops.progress import _ProcessedTracker


def fit_is_ending(trainer: pl.Trainer, in_optimizer_step: bool = False) -> bool:
    """Return whether no further optimizer step will follow, as far as anybody knows now.

    Args:
        trainer: in its fit loop.
        in_optimizer_step: True within `Strategy.optimizer_step`, where the Trainer has not counted
            the step yet.
    """
    loop = trainer.fit_loop
    steps_done = trainer.global_step + in_optimizer_step
    if trainer.max_steps != -1 and steps_done >= trainer.max_steps:
        return True
    if trainer.should_stop and loop._can_stop_early:
        return True
    if loop.max_epochs is None or loop.max_epochs == -1:
        return False
    epoch = cast(_ProcessedTracker, loop.epoch_progress.current)
    batches_reached = loop.epoch_loop._num_ready_batches_reached()
    if in_optimizer_step:  # within an epoch, which is processed when it has run through
        return epoch.processed >= loop.max_epochs - 1 and batches_reached
    # `ready` counts the epochs that were begun; a fit resumed at an epoch's end counts one too few
    return epoch.ready >= loop.max_epochs and (
        epoch.processed >= loop.max_epochs or batches_reached
    )
