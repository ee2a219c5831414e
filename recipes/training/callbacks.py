"""Create the callbacks of `callbacks=...`; refuse those that cannot work before data is read."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
from hydra.utils import get_class, instantiate
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor

from lightning_commfree import DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.fit.checks import REFUSED_IF_LOCAL, REFUSED_IF_SHARDED, refuse_callbacks
from recipes.training.elastic import is_elastic
from recipes.training.layout import inside_of

_AVERAGING = getattr(callbacks, "WeightAveraging", ())  # Lightning 2.6 and later
_VALIDATION_METRICS = ("val/loss", "val/perplexity")
_METRICS = (*_VALIDATION_METRICS, "train/loss")


def build_callbacks(config: Mapping[str, Any]) -> list[pl.Callback]:
    """Create the callbacks of the section `callbacks`, and check that they can work in this run.

    Raises:
        ValueError: the strategy does not support a callback, or the metric that it monitors or the
            logger that it needs is missing.
    """
    found = [instantiate(callback, _convert_="all") for callback in config["callbacks"].values()]
    strategy = config["strategy"]
    kind = get_class(strategy["_target_"])
    reasons: dict[str, str] = {}
    if issubclass(kind, DominoTPStrategy) or inside_of(strategy) != "ddp":
        reasons |= REFUSED_IF_SHARDED
    if issubclass(kind, StreamingDiLoCoStrategy):
        reasons |= REFUSED_IF_LOCAL
    refuse_callbacks(cast(pl.Trainer, SimpleNamespace(callbacks=found)), kind.__name__, reasons)
    for callback in found:
        if isinstance(callback, _AVERAGING) and is_elastic(strategy):
            raise ValueError(
                f"`{type(callback).__name__}` cannot be combined with strategy=elastic_diloco: each"
                " replica would average only the steps since it joined, and end with other weights."
                " Use callbacks=none, or strategy=streaming_diloco."
            )
        if isinstance(callback, LearningRateMonitor) and not config["logger"]:
            raise ValueError(
                "callbacks=lr_monitor writes to loggers, and logger=none has none. Use logger=csv,"
                " or callbacks=none."
            )
        if isinstance(callback, EarlyStopping):
            _check_monitor(callback, config["trainer"])
    return found


def _check_monitor(callback: EarlyStopping, trainer: Mapping[str, Any]) -> None:
    name = callback.monitor
    if name not in _METRICS:
        raise ValueError(
            f"`{type(callback).__name__}` monitors '{name}', which this recipe does not log. Legal"
            f" are {', '.join(_METRICS)}."
        )
    if name in _VALIDATION_METRICS and trainer["limit_val_batches"] == 0:
        raise ValueError(
            f"`{type(callback).__name__}` monitors '{name}', but trainer.limit_val_batches=0 turns"
            " validation off. Raise it, or use callbacks=none."
        )
