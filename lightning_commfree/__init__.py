"""PyTorch Lightning strategies for training over networks that cannot keep up with the GPUs.

Importing the package registers them: `Trainer(strategy="streaming_diloco")`.
"""

from __future__ import annotations

from lightning_commfree.layouts import FSDPSettings
from lightning_commfree.lion import DistributedLion
from lightning_commfree.model.meta_init import from_pretrained_on_meta
from lightning_commfree.strategies import (
    DistributedLionStrategy,
    DominoTPStrategy,
    ElasticDiLoCoStrategy,
    StreamingDiLoCoStrategy,
)

__all__ = [
    "DistributedLion",
    "DistributedLionStrategy",
    "DominoTPStrategy",
    "ElasticDiLoCoStrategy",
    "FSDPSettings",
    "StreamingDiLoCoStrategy",
    "from_pretrained_on_meta",
]
