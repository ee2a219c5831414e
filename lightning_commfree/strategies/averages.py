"""Lightning's `WeightAveraging` (2.6 and later) and its kind, on outer weights.

The local weights of a replica are its own, so an average of them is too. Here such a callback is
updated as often as under DDP, with the outer weights as they stand, on which all ranks agree. The
rest is as it is: it puts its average into the module for a validation and where a fit has ended,
and into a checkpoint, from which it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

from lightning_commfree.model.weight_swap import OuterView, WeightSwap

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

_KIND = getattr(callbacks, "WeightAveraging", None)
_UPDATES = ("on_train_batch_end", "on_train_epoch_end")


def average_outer_weights(strategy: ReplicaStrategy, swap: WeightSwap) -> Callable[[], None]:
    """Let the Trainer's callbacks average outer weights.

    Args:
        strategy: whose fit begins.
        swap: has the outer weights.

    Returns:
        Puts their averages into the module; call it after the last exchange, which must see the
        module's own weights.
    """
    trainer, patches, ends = strategy.module.trainer, strategy.patches, []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if _KIND is None or not isinstance(callback, _KIND):
            continue
        for name in _UPDATES:
            patches.put(callback, name, partial(_update, getattr(callback, name), swap))
        ends.append(callback.on_train_end)
        patches.put(callback, "on_train_end", lambda *_: None)

    def put_in() -> None:
        for end in ends:
            end(trainer, strategy.module)

    return put_in


def _update(
    hook: Callable[..., None],
    swap: WeightSwap,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *args: Any,
) -> None:
    hook(trainer, OuterView(module, swap), *args)
