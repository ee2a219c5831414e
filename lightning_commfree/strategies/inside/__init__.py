"""What holds a replica together: how its ranks hold and compute one model."""

from lightning_commfree.strategies.inside.ddp import DataParallel

__all__ = ["DataParallel"]
