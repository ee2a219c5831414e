"""Is this fit about to end?

Lightning decides it in nested loops; here is the same decision at one moment.
`Strategy.on_train_end` is the last hook of a fit: callbacks have validated and written their last
checkpoint by then. What must be in that checkpoint has to happen before, so the end is foreseen
wherever it can be.
"""

from __future__ import annotations

from typing import cast

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
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
    if epoch.started < epoch.ready:  # it begins; the counter of batches is the last epoch's
        return False
    batches_reached = loop.epoch_loop._num_ready_batches_reached()
    if in_optimizer_step:  # within an epoch, which is processed when it has run through
        return epoch.processed >= loop.max_epochs - 1 and batches_reached
    # `ready` counts the epochs that were begun; a fit resumed at an epoch's end counts one too few
    return epoch.ready >= loop.max_epochs and (
        epoch.processed >= loop.max_epochs or batches_reached
    )


class EarlySaves:
    """Checkpoints of a fit that were written before its weights were the final ones.

    1. `ModelCheckpoint` saves at the end of a validation, after step 250.
    2. The epoch ends; a callback sets `trainer.should_stop`. The last exchange changes the weights.
    3. The file of step 250 is the last checkpoint and must validate like the model in memory.
    """

    def __init__(self) -> None:
        self._saves: list[tuple[_PATH, int, bool]] = []

    def note(self, filepath: _PATH, step: int, weights_only: bool) -> None:
        """Keep in mind that a checkpoint is written, and after which inner step."""
        self._saves.append((filepath, step, weights_only))

    def forget(self, filepath: _PATH) -> None:
        """A checkpoint is removed."""
        self._saves = [save for save in self._saves if save[0] != filepath]

    def of(self, step: int) -> list[tuple[_PATH, bool]]:
        """Return path and whether without the trainer's state, of those written after `step`."""
        return [(path, weights_only) for path, after, weights_only in self._saves if after == step]
