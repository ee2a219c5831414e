"""What a fit of Lightning's must be for `DominoTPStrategy`, before a model is divided."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.domino import check_module, on_meta
from lightning_commfree.lightning_internals import is_compiled
from lightning_commfree.strategies.checks import refuse_fp16


def check_fit(strategy: str, module: pl.LightningModule, precision: Precision, ranks: int) -> None:
    """See that the strategy can train this module.

    Args:
        strategy: its name.
        module: not divided yet.
        precision: the Trainer's.
        ranks: that shall share a model.

    Raises:
        ValueError: it is compiled, manual optimization, fp16, no model that can be divided, or
            not among so many ranks.
    """
    if is_compiled(module):
        raise ValueError(
            f"`{strategy}` does not support `torch.compile` of the LightningModule: the all-reduces"
            " of a divided model are launched and landed by Python between its layers, where the"
            " compiler fails. Give `fit` the module as it is."
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"`{strategy}` does not support manual optimization: it has to know the last backward"
            " before an optimizer step. Leave `automatic_optimization` True."
        )
    refuse_fp16(strategy, precision)
    check_module(strategy, module, ranks)


def may_change(module: pl.LightningModule) -> bool:
    """Return whether hooks that run once the ranks are there may make or change the model."""
    names = ("configure_model", "configure_sharded_model", "setup")
    return any(is_overridden(name, module, pl.LightningModule) for name in names)


def warn_once() -> Callable[[str], None]:
    """Return what warns of a text the first time it is told of it."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            rank_zero_warn(text)

    return say


def check_values(strategy: str, module: pl.LightningModule) -> None:
    """Refuse, outside of a fit, a model without values.

    Raises:
        ValueError: it is on the `meta` device.
    """
    if without := on_meta(module):
        raise ValueError(
            f"{len(without)} tensors, {without[0]!r} among them, are on the meta device and hold no"
            f" values. `{strategy}` gives them some in `fit` only: call it first, or build the"
            " model on the CPU."
        )
