"""Step counters: an optimizer step, or a whole batch under manual optimization.

Algorithms communicate after a step, so all ranks must count the same steps. A LightningModule with
manual optimization (a GAN, PPO) may step its optimizers several times in a batch, and in between
its weights are half updated, so for it a step is the whole batch.
"""

from __future__ import annotations

from typing import Protocol

from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.host import pl


class Clock(Protocol):
    """Step counter of a fit."""

    steps: int  # so far
    spans_batch: bool  # whether a step is a whole `training_step`, not one optimizer step
    # Optimizer steps that `trainer.global_step` lacks when a step ends: Lightning counts one only
    # after `Strategy.optimizer_step` has returned.
    uncounted: int

    def tick(self, optimizer: Optimizer | None) -> bool:
        """Return whether a step has ended, and count it.

        `optimizer` is the one that has stepped; None at the end of a `training_step`.
        """
        ...


class PerOptimizerStep(Clock):
    """Count every optimizer step; for automatic optimization, which has one optimizer."""

    spans_batch = False
    uncounted = 1

    def __init__(self) -> None:
        self.steps = 0

    @override
    def tick(self, optimizer: Optimizer | None) -> bool:
        self.steps += optimizer is not None
        return optimizer is not None


class PerBatch(Clock):
    """Count the batches in which at least one optimizer stepped, however often."""

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
    """Return the step counter that fits the module's kind of optimization."""
    return PerOptimizerStep() if module.automatic_optimization else PerBatch()
