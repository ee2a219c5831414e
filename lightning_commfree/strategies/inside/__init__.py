"""What holds a replica together: how its ranks hold and compute one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_commfree.strategies.contracts import Inside
from lightning_commfree.strategies.inside.ddp import DataParallel
from lightning_commfree.strategies.inside.fsdp import FullyShard

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

__all__ = ["DataParallel", "FullyShard", "chosen"]


def chosen(strategy: ReplicaStrategy, inside: str, size: int, argument: str) -> Inside:
    """Return what the user has chosen.

    Args:
        strategy: whose ranks.
        inside: its name.
        size: ranks of a replica.
        argument: what the user calls `size`.

    Raises:
        ValueError: no such name, or it does not fit the size.
    """
    if inside == "ddp":
        return DataParallel(size, argument)
    if inside == "fsdp":
        return FullyShard(strategy, size, argument)
    raise ValueError(
        f"`inside={inside!r}` is unknown. Choose 'ddp', every rank of a replica holds the whole"
        " model, or 'fsdp', each holds a part of it."
    )
