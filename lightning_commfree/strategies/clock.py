"""What counts as a step.

An algorithm exchanges what is due after a step, and all ranks must count the same steps. With
automatic optimization a step is one step of the one optimizer. A LightningModule that steps its
optimizers by hand (a GAN, PPO) may take several steps in a batch, and between two of them its
weights are half updated: there a step is the whole batch.
"""

from __future__ import annotations

from typing import Protocol

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override


class Clock(Protocol):
    """Counts the steps of a fit.

    Attributes:
        steps: steps so far.
        spans_batch: a step is a whole `training_step`, else it is a step of an optimizer.
        uncounted: optimizer steps that `trainer.global_step` lacks when a step is over. Lightning
            counts a step of an optimizer after `Strategy.optimizer_step` has returned.
    """

    steps: int
    spans_batch: bool
    uncounted: int

    def tick(self, optimizer: Optimizer | None) -> bool:
        """Return whether a step is over, and count it.

        Args:
            optimizer: has stepped; None: a batch's `training_step` is over.
        """
        ...


class PerOptimizerStep(Clock):
    """Every step of an optimizer counts; for automatic optimization, which has one optimizer."""

    spans_batch = False
    uncounted = 1

    def __init__(self) -> None:
        self.steps = 0

    @override
    def tick(self, optimizer: Optimizer | None) -> bool:
        self.steps += optimizer is not None
        return optimizer is not None


class PerBatch(Clock):
    """A batch in which at least one optimizer stepped counts, however many steps they took."""

    spans_batch = True
    uncounted = 0

    def __init__(self) -> None:
        self.steps = 0
        self._stepped = False  # some optimizer, in the batch that runs

    @override
    def tick(self, optimizer: Optimizer | None) -> bool:
        if optimizer is not None:
            self._stepped = True
            return False
        stepped, self._stepped = self._stepped, False
        self.steps += stepped
        return stepped


def clock_for(module: pl.LightningModule) -> Clock:
    """Return what counts as a step of this module's fit."""
    return PerOptimizerStep() if module.automatic_optimization else PerBatch()
