"""The Lightning package in use, and all public names that the library imports from it.

Lightning is distributed twice: as `lightning.pytorch` (in the package `lightning`) and as
`pytorch_lightning`. The code is the same, but the classes differ: a Trainer from one package
rejects strategies, modules and callbacks from the other. The library uses one package per process:

1. the one named in the environment variable COMMFREE_HOST: "lightning" or "pytorch_lightning";
2. otherwise the one that is already imported, or `lightning` if both are;
3. otherwise `lightning.pytorch`, or `pytorch_lightning` if only that is installed.

An import of Lightning by a third-party package counts too, if it comes before the import of
`lightning_commfree`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

VARIABLE = "COMMFREE_HOST"
_MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def choose(environment: Mapping[str, str]) -> str:
    """Choose the Lightning package for this process: "lightning" or "pytorch_lightning".

    Raises:
        ValueError: the environment variable `COMMFREE_HOST` is set to any other value.
    """
    if name := environment.get(VARIABLE):
        if name not in _MODULES:
            raise ValueError(
                f"The environment variable {VARIABLE} is set to {name!r}, which is not recognized."
                f" Set it to {' or '.join(map(repr, _MODULES))}, to match the package that you"
                " import `Trainer` from."
            )
        return name
    # take the one imported first: a library built on one may import the other for an integration
    names = {module: name for name, module in _MODULES.items()}
    imported = [names[module] for module in list(sys.modules) if module in names]
    if imported:
        return imported[0]
    return "lightning" if find_spec("lightning") else "pytorch_lightning"


HOST = choose(os.environ)
_OTHER = next(name for name in _MODULES if name != HOST)

if TYPE_CHECKING or HOST == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import callbacks
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:
    import pytorch_lightning as pl
    from lightning_fabric.plugins import CheckpointIO
    from pytorch_lightning import callbacks
    from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.plugins import TorchCheckpointIO
    from pytorch_lightning.plugins.io import AsyncCheckpointIO
    from pytorch_lightning.plugins.precision import DoublePrecision, MixedPrecision, Precision
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import CombinedLoader
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden


def other_is_imported() -> bool:
    """Return whether the Lightning package that this library does not use has been imported."""
    return _MODULES[_OTHER] in sys.modules


def wrong_host(what: str) -> str:
    """Return the error message for using `what` with a Trainer from the other Lightning package."""
    return (
        f"{what} is for {_MODULES[HOST]} and does not work with a Trainer from {_MODULES[_OTHER]}."
        f" Set the environment variable {VARIABLE}={_OTHER} before importing lightning_commfree."
    )


__all__ = [
    "HOST",
    "VARIABLE",
    "AsyncCheckpointIO",
    "CheckpointIO",
    "CombinedLoader",
    "DDPStrategy",
    "DoublePrecision",
    "LightningOptimizer",
    "MixedPrecision",
    "ModelCheckpoint",
    "OnExceptionCheckpoint",
    "Precision",
    "SIGTERMException",
    "StrategyRegistry",
    "TorchCheckpointIO",
    "TrainerFn",
    "TrainerStatus",
    "callbacks",
    "choose",
    "is_overridden",
    "pl",
    "other_is_imported",
    "wrong_host",
]
