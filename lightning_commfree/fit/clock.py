"""Step counter: a step is an optimizer step or, with manual optimization, a whole batch.

Algorithms communicate after a step, so all ranks must count the same steps. A LightningModule with
manual optimization (a GAN, PPO) may step its optimizers several times per batch, with half-updated
weights in between, so the whole batch counts as one step.

Lightning tells a strategy only about steps of its own `LightningOptimizer`. `StepHooks` finds the
others in torch: `optimizer.optimizer.step(closure)` in an overridden `optimizer_step`, a step of
`trainer.optimizers[0]`, the inner optimizer of SAM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Clock:
    """Counts steps of a fit: optimizer steps or, in manual optimization, batches with one."""

    def __init__(self, spans_batch: bool = False) -> None:
        # `spans_batch` (manual optimization): a `training_step` that steps any optimizer is a step.
        # `missed`: how often a step was possible but not taken, for example because the module
        # found NaN in its gradients and did not call `optimizer.step`.
        self.steps, self.missed, self.spans_batch = 0, 0, spans_batch
        # at the end of a step, the steps that `trainer.global_step` lacks: Lightning counts an
        # optimizer step only after `Strategy.optimizer_step` has returned
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
        self.missed += self.spans_batch and not ended
        return ended


class StepHooks:
    """Calls functions around optimizer steps that Lightning does not pass to the strategy.

    Only optimizers that hold parameters of `module` count. A step inside another one, as of an
    optimizer that wraps a second one, is part of the outer step. `begins` and `ends` are called
    around such a step, and `before_any_step` before every step, also those that Lightning passes.
    """

    def __init__(
        self,
        module: nn.Module,
        begins: Callable[[Optimizer], None],
        ends: Callable[[Optimizer], None],
        before_any_step: Callable[[Optimizer], None],
    ) -> None:
        self._parameters = set(module.parameters())
        self._begins, self._ends = begins, ends
        self._before_any_step = before_any_step
        self._paused = False
        self._stepping: Optimizer | None = None
        # for all optimizers, because Lightning does not know the one inside of SAM
        self._handles = [
            register_optimizer_step_pre_hook(self._pre_hook),
            register_optimizer_step_post_hook(self._post_hook),
        ]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager around a step for which `begins` and `ends` are not called."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _pre_hook(self, optimizer: Optimizer, *_: Any) -> None:
        """If the module uses it: `before_any_step`, and `begins` unless paused or nested."""
        if not self._trains(optimizer):
            return
        self._before_any_step(optimizer)
        # the same optimizer again: user code has caught an error in its first step
        is_outermost = self._stepping is None or self._stepping is optimizer
        if is_outermost and not self._paused:
            self._stepping = optimizer
            self._begins(optimizer)

    def _post_hook(self, optimizer: Optimizer, *_: Any) -> None:
        """Call `ends` if `begins` was called for this step."""
        if self._stepping is optimizer:
            self._stepping = None
            self._ends(optimizer)

    def _trains(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the module."""
        groups = optimizer.param_groups
        return any(p in self._parameters for group in groups for p in group["params"])

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
