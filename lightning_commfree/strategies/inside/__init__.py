"""What holds a replica together: how its ranks hold and compute one model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_commfree.comm.division import FSDPSettings
from lightning_commfree.comm.mesh import REPLICA
from lightning_commfree.domino import DominoSettings
from lightning_commfree.strategies.contracts import Inside
from lightning_commfree.strategies.inside.ddp import DataParallel
from lightning_commfree.strategies.inside.domino import TensorParallel
from lightning_commfree.strategies.inside.fsdp import FullyShard

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

__all__ = ["DataParallel", "FSDPSettings", "FullyShard", "TensorParallel", "chosen", "name_of"]


_SETTINGS = {"fsdp": FSDPSettings(), "domino": DominoSettings()}


def name_of(inside: str | FSDPSettings | DominoSettings) -> str | DominoSettings:
    """Return what an exact resume must find again: settings of FSDP change no value."""
    return "fsdp" if isinstance(inside, FSDPSettings) else inside


def chosen(
    strategy: ReplicaStrategy, inside: str | FSDPSettings | DominoSettings, size: int, argument: str
) -> Inside:
    """Return what the user has chosen.

    Args:
        strategy: whose ranks.
        inside: its name, or settings.
        size: ranks of a replica.
        argument: what the user calls `size`.

    Raises:
        ValueError: no such name, or it does not fit the size.
    """
    if inside == "ddp":
        return DataParallel(size, argument)
    settings = _SETTINGS.get(inside, inside) if isinstance(inside, str) else inside
    if not isinstance(settings, FSDPSettings | DominoSettings):
        raise ValueError(
            f"`inside={inside!r}` is unknown. Choose 'ddp', every rank of a replica holds the whole"
            " model, 'fsdp' (or `FSDPSettings`), each holds a part of it, or 'domino' (or"
            " `DominoSettings`), each computes a part of every layer."
        )
    if size < 2:
        raise ValueError(
            f"`inside={inside!r}` divides a replica among its ranks, and with `{argument}={size}`"
            f" it has one. Set `{argument}` to the ranks of a replica, or leave `inside` at 'ddp'."
        )
    if isinstance(settings, FSDPSettings):
        return FullyShard(strategy, size, argument, settings)
    return TensorParallel(strategy, replace(settings, tensor_parallel_size=size), argument, REPLICA)
