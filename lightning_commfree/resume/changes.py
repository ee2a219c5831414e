"""Save and restore what hooks change during a fit and Lightning does not save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_commfree.host import pl


class FitChanges:
    """Saves and restores settings that hooks change during a fit.

    - `trainer.accumulate_grad_batches`, which `GradientAccumulationScheduler` changes.
    - Which parameters are frozen (`requires_grad`), which `BaseFinetuning` changes.

    Create this object before training starts.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._accumulate = trainer.accumulate_grad_batches
        self._is_trained = _requires_grad_by_name(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return `accumulate_grad_batches` at the start and now, and changes of `requires_grad`."""
        at_start = self._is_trained
        return {
            "accumulate": [self._accumulate, self._trainer.accumulate_grad_batches],
            "is_trained": {
                name: now
                for name, now in _requires_grad_by_name(self._trainer).items()
                if now != at_start.get(name, now)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore what hooks had changed; return messages about what the user has set anew."""
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if name in state["is_trained"]:
                parameter.requires_grad_(state["is_trained"][name])
        at_start, now = state["accumulate"]
        if at_start != self._accumulate:
            return [f"`accumulate_grad_batches` was {at_start} and is {self._accumulate}"]
        self._trainer.accumulate_grad_batches = now
        return []


def _requires_grad_by_name(trainer: pl.Trainer) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in trainer.lightning_module.named_parameters()}
