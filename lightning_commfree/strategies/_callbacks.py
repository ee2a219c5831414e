"""Callbacks that cannot work where ranks hold weights of their own, or parts of them."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch import callbacks

# by name: the first came with Lightning 2.6
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")
_OF_PARTS = "it copies the whole model before the ranks have divided it"
REPLICAS = {
    "StochasticWeightAveraging": (
        "it averages the local weights of each replica, and would leave different ones on every"
        " rank. From Lightning 2.6 on `WeightAveraging` and `EMAWeightAveraging` average the outer"
        " ones, on which they agree"
    ),
    "ModelPruning": (
        "in the middle of a fit it gives parameters other names, under which they are exchanged,"
        " and masks that each replica makes of its own local weights"
    ),
}
EAGER = {
    "WeightAveraging": (
        "with `overlap_steps='eager'` the outer weights, which it averages, differ between replicas"
    )
}
PARTS = {
    **dict.fromkeys(_AVERAGES, _OF_PARTS),
    "ModelPruning": (
        "it would choose what to prune in each rank's part of a weight, not in the whole, and it"
        " gives parameters other names, under which checkpoints could not be put together"
    ),
}


def refuse_callbacks(trainer: pl.Trainer, strategy: str, reasons: Mapping[str, str]) -> None:
    """Look at the Trainer's callbacks, `Tuner`'s own included.

    Args:
        trainer: has them.
        strategy: its name.
        reasons: why a callback of Lightning's cannot work, by class name.

    Raises:
        ValueError: one of them, or of a class derived from it, is there.
    """
    for name, reason in reasons.items():
        kind = getattr(callbacks, name, None)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if kind is not None and isinstance(callback, kind):
                raise ValueError(
                    f"`{strategy}` does not support the callback `{type(callback).__name__}`:"
                    f" {reason}. Leave it out; what it does can be done in a Trainer with the"
                    " strategy `ddp` or on a single device."
                )
