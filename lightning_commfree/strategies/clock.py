"""Step counter: a step is an optimizer step or, with manual optimization, a whole batch.

Algorithms communicate after a step, so all ranks must count the same steps. A LightningModule with
manual optimization (a GAN, PPO) may step its optimizers several times per batch, with half-updated
weights in between, so the whole batch counts as one step.
"""

from __future__ import annotations

from torch.optim import Optimizer


class Clock:
    """Counts the steps in a fit.

    Args:
        spans_batch: if False, every optimizer step counts. If True (manual optimization), a
            `training_step` counts as one step if it steps any optimizer.

    Attributes:
        steps: number of steps so far.
        uncounted: at the end of a step, the number of completed optimizer steps that
            `trainer.global_step` does not include yet: 1 with automatic optimization, because
            Lightning counts an optimizer step only after `Strategy.optimizer_step` has returned; 0
            with manual optimization.
    """

    def __init__(self, spans_batch: bool = False) -> None:
        self.steps, self.spans_batch = 0, spans_batch
        self.uncounted = 0 if spans_batch else 1
        self._stepped = False  # whether any optimizer has stepped in the current batch

    def tick(self, optimizer: Optimizer | None) -> bool:
        """Count a step if one has just ended, and return whether it has.

        `optimizer` is the optimizer that has just stepped, or None at the end of a `training_step`.
        """
        if self.spans_batch and optimizer is not None:
            self._stepped = True
            return False
        ended = self._stepped if self.spans_batch else optimizer is not None
        self._stepped = False
        self.steps += ended
        return ended
