"""Callbacks that cannot work where every replica trains weights of its own."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch import callbacks

_AVERAGES = (
    "it averages the local weights of each replica, and would leave different ones on every rank"
)
_REASONS = {
    # by name: the first came with Lightning 2.6
    "WeightAveraging": _AVERAGES,
    "StochasticWeightAveraging": _AVERAGES,
    "LearningRateFinder": (
        "it trains, then puts the module's weights back and leaves the strategy's copies of them"
    ),
}


def refuse_callbacks(trainer: pl.Trainer, strategy: str) -> None:
    """Look at the Trainer's callbacks, `Tuner`'s own included.

    Raises:
        ValueError: one of them, or of a class derived from it, is there.
    """
    for name, reason in _REASONS.items():
        kind = getattr(callbacks, name, None)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if kind is not None and isinstance(callback, kind):
                raise ValueError(
                    f"`{strategy}` does not support the callback `{type(callback).__name__}`:"
                    f" {reason}. Leave it out; what it does can be done in a Trainer with the"
                    " strategy `ddp` or on a single device."
                )
