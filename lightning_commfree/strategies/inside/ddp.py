"""A replica of one rank, or of several with DDP: every rank holds the whole model."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_commfree.comm.averaging import refuse_sync_batchnorm
from lightning_commfree.comm.materialize import on_meta
from lightning_commfree.comm.mesh import Mesh, replica_mesh
from lightning_commfree.comm.sharing import common_start
from lightning_commfree.lightning_internals import set_ddp_group
from lightning_commfree.strategies.checks import check_training
from lightning_commfree.strategies.contracts import Inside


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
        check_training(type(strategy).__name__, trainer, strategy.module)
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
