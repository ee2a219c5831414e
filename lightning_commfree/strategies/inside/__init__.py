"""The layouts of a replica: how its ranks hold and compute one model.

Here is the layout of one rank, or of several with DDP, where every rank holds the full model.
`fsdp` and `domino` have those whose ranks hold shards of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_commfree.comm.job import REPLICA, Mesh, replica_mesh
from lightning_commfree.domino import DominoSettings
from lightning_commfree.lightning_internals import set_ddp_group
from lightning_commfree.model.fsdp import FSDPSettings
from lightning_commfree.model.meta_init import on_meta
from lightning_commfree.model.replication import common_start, refuse_sync_batchnorm
from lightning_commfree.strategies.checks import refuse_timed_validation
from lightning_commfree.strategies.contracts import Inside
from lightning_commfree.strategies.inside.domino import TensorParallel
from lightning_commfree.strategies.inside.fsdp import FullyShard

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class DataParallel(Inside):
    """Ranks of a replica average their gradients.

    Args:
        size: ranks of a replica.
        argument: what the user calls `size`.
    """

    def __init__(self, size: int = 1, argument: str = "replica_size") -> None:
        self.size, self.uses_ddp = size, size > 1
        self._argument = argument

    @override
    def check(self, strategy: Any, trainer: pl.Trainer) -> None:
        refuse_timed_validation(type(strategy).__name__, trainer)
        if names := on_meta(strategy.module):
            raise ValueError(
                f"The model is on the `meta` device ('{names[0]}' and {len(names) - 1} more have"
                " shapes and no values), and with `inside='ddp'` nothing gives it values: build it"
                f" with values, or give ranks parts of it: `inside='fsdp'`, `{self._argument}` from"
                " 2 on."
            )

    @override
    def prepare(self, strategy: Any) -> None:
        refuse_sync_batchnorm(type(strategy).__name__, strategy.module)
        common_start(strategy.channels.world, strategy.module, strategy.fingerprint())
        if self.uses_ddp:
            set_ddp_group(strategy, strategy.channels.within.group)
            DDPStrategy.configure_ddp(strategy)

    @override
    def mesh(self, world_size: int) -> Mesh:
        return replica_mesh(world_size, self.size, self._argument)


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
