"""Fit session for ranks that communicate at every step and then hold identical weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.fit.contracts import EveryStep
from lightning_commfree.fit.session import FitSession
from lightning_commfree.resume.rank_files import copy_to_cpu


class LockstepSession(FitSession[EveryStep]):
    """Fit session for algorithms that communicate at every step."""

    compares_weights = shares_stream_ends = True
    why_not_manual = (
        "its ranks exchange something at every optimizer step, but manual optimization may step"
        " any number of times per batch, and other optimizers on other ranks"
    )

    @override
    def begin(self, resumed: bool) -> None:
        """Let the algorithm follow weights that hooks have changed, then begin."""
        self.between.follow_parameters()
        super().begin(resumed)

    @override
    def before_any_step(self, optimizer: Optimizer) -> None:
        """Raise a `RuntimeError` for an optimizer that `configure_optimizers` did not return."""
        if self._trainer.training and not any(optimizer is one for one in self._optimizers):
            raise RuntimeError(
                f"`{type(optimizer).__name__}` steps parameters of the module, but"
                " `configure_optimizers` did not return it. Its steps are not exchanged, so the"
                " ranks would end with different weights. Return it from `configure_optimizers`."
            )

    @override
    def step_left_out(self) -> None:
        """Count it and wait for all ranks; raise an `AgreedError` if one takes the step."""
        super().step_left_out()
        self._stopping.check_together(
            "An optimizer step was left out (`optimizer_step` did not call `optimizer.step`)",
            "Ranks that exchange something at every step must take the same steps. Agree on the"
            " condition first, for example with an all-reduce, or use `nonfinite='abstain'`.",
        )

    @override
    def validation_begins(self) -> None:
        """Average the buffers over all replicas; collective."""
        super().validation_begins()
        self.between.average_buffers()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return `read()` with averaged buffers, copied; the module keeps its own. Collective."""
        if self._ranks.interrupted:
            return read()
        # a checkpoint contains the means, but saving must not change how a fit trains
        averaged = self.between.averaged_buffers()
        buffers = [] if averaged is None else averaged.tensors()
        own = [buffer.clone() for buffer in buffers]
        self.between.average_buffers()
        state: dict[str, Any] = copy_to_cpu(read(), only=buffers)
        for buffer, values in zip(buffers, own, strict=True):
            buffer.copy_(values)
        return state

    @override
    def fit_ends(self) -> None:
        """Average the buffers over all replicas; collective."""
        self.between.average_buffers()
