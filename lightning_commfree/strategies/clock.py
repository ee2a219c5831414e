"""Step counters: a step is an optimizer step or, with manual optimization, a whole batch.

Algorithms communicate after a step, so all ranks must count the same steps. A LightningModule with
manual optimization (a GAN, PPO) may step its optimizers several times per batch, with half-updated
weights in between, so the whole batch counts as one step.
"""

from __future__ import annotations

from typing import Protocol

from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.host import pl


class Clock(Protocol):
    """Counter of the steps in a fit."""

    steps: int  # so far
    spans_batch: bool  # whether a step is a whole `training_step`, not one optimizer step
    # Optimizer steps that `trainer.global_step` lacks when a step ends: Lightning counts one only
    # after `Strategy.optimizer_step` has returned.
    uncounted: int

    def tick(self, optimizer: Optimizer | None) -> bool:
        """Count a step if one has just ended; return whether it has.

        `optimizer` is the one that has just stepped; None at the end of a `training_step`.
        """
        ...


class PerOptimizerStep(Clock):
    """Counter of all optimizer steps, for automatic optimization, which has one optimizer."""

    spans_batch = False
    uncounted = 1

    def __init__(self) -> None:
        self.steps = 0

    @override
    def tick(self, optimizer: Optimizer | None) -> bool:
        self.steps += optimizer is not None
        return optimizer is not None


class PerBatch(Clock):
    """Counter of the batches in which at least one optimizer stepped, for manual optimization."""

    spans_batch = True
    uncounted = 0

    def __init__(self) -> None:
        self.steps = 0
        self._stepped = False  # whether any optimizer has stepped in the current batch

    @override
    def tick(self, optimizer: Optimizer | None) -> bool:
        if optimizer is not None:
            self._stepped = True
            return False
        stepped, self._stepped = self._stepped, False
        self.steps += stepped
        return stepped


def clock_for(module: pl.LightningModule) -> Clock:
    """Return the step counter for the module's kind of optimization, automatic or manual."""
    return PerOptimizerStep() if module.automatic_optimization else PerBatch()
