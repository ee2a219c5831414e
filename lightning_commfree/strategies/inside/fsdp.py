"""A replica whose ranks hold shards of one model by FSDP2, `torch.distributed.fsdp.fully_shard`.

Every block of the model is a unit, and the rest of the model is one more. A unit's parameters are
sharded by rows; they are gathered for its forward and its backward, and their gradients are reduced
to the mean over the replica, of which each rank keeps its shard. The module stays sharded after the
fit, as after a fit of Lightning's own strategies for sharded models: `trainer.test` uses it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.job import DATA, Mesh, replica_mesh
from lightning_commfree.lightning_internals import OrderlyLauncher
from lightning_commfree.model.fsdp import (
    FSDPSettings,
    accumulating,
    divide,
    refuse_wrapped,
    step_bytes,
    why_not_divided,
)
from lightning_commfree.model.meta_init import Materializer
from lightning_commfree.model.replication import common_start, refuse_sync_batchnorm
from lightning_commfree.model.shards import RowShards
from lightning_commfree.resume.checkpoint_io import WholeCheckpointIO
from lightning_commfree.resume.folders import FolderTensor
from lightning_commfree.strategies.checks import refuse_manual
from lightning_commfree.strategies.inside.sharded import DividedModel

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


# of the group's ledger; FSDP sends by itself, so these are counted by its formulas
GATHER_TAG, SCATTER_TAG = "fsdp_gather", "fsdp_scatter"

_WHY_NOT_MANUAL = (
    "with `inside='fsdp'` FSDP takes `training_step` for the forward of the whole model and expects"
    " backward after it has returned, while manual optimization calls backward inside of it. With"
    " `inside='ddp'` it is possible"
)


class FullyShard(DividedModel):
    """Ranks of a replica hold shards of its parameters, gradients and optimizer state.

    Args:
        strategy: whose ranks.
        size: ranks of a replica, 2 or more.
        argument: what the user calls `size`.
        settings: units.

    Raises:
        ValueError: torch is too old.
    """

    def __init__(
        self,
        strategy: ReplicaStrategy,
        size: int,
        argument: str,
        settings: FSDPSettings,
    ) -> None:
        if why := why_not_divided():
            raise ValueError(f"`inside='fsdp'` is not possible here: {why}, or take 'ddp'.")
        super().__init__(strategy, settings)
        self.size, self._argument = size, argument
        self._divided: nn.Module | None = None
        self._step_bytes, self._in_fit = (0, 0), False

    @property
    @override
    def states(self) -> RowShards | None:
        divided = self._divided
        here = divided is self._strategy.lightning_module  # else an earlier fit sharded another one
        return RowShards(divided) if divided is not None and here else None

    @property
    @override
    def saves_folders(self) -> bool:
        limit = self._settings.folder_above_bytes
        if limit is None or not self._in_fit:
            return False
        parameters = self._strategy.module.parameters()
        ours = type(self._strategy.checkpoint_io) is WholeCheckpointIO  # a user's writes files
        return ours and sum(p.numel() * p.itemsize for p in parameters) > limit

    @override
    def mesh(self, world_size: int) -> Mesh:
        return replica_mesh(world_size, self.size, self._argument)

    # -- before a fit

    @override
    def check(self, strategy: ReplicaStrategy, trainer: pl.Trainer) -> None:
        super().check(strategy, trainer)
        refuse_manual(type(strategy).__name__, strategy.module, _WHY_NOT_MANUAL)
        if strategy.module is not self._divided:
            refuse_wrapped(type(strategy).__name__, strategy.module)

    @override
    def prepare(self, strategy: ReplicaStrategy) -> None:
        """Shard the model, unit by unit, on this rank's device; FSDP averages the gradients."""
        module, device = strategy.module, strategy.root_device
        refuse_sync_batchnorm(type(strategy).__name__, module)
        channels, fingerprint = strategy.channels, strategy.fingerprint()
        if module is self._divided:  # by an earlier fit
            common_start(channels.world, module, fingerprint, channels.between)
        else:
            seed = self._start()
            fill = Materializer(module, seed) if self._was_on_meta else None
            replicas = self.mesh(strategy.world_size).groups(DATA)
            units = self._settings.units
            divide(module, replicas, strategy.global_rank, device, fill, units)
            self._divided = module
            if fill is not None and fill.reads:  # from a disk of its own, perhaps
                common_start(channels.world, module, fingerprint, channels.between)
        module.to(device)

    @override
    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        super().begin(optimizers)
        self._step_bytes, self._in_fit = step_bytes(self._strategy.module), True

    @override
    def release(self) -> None:
        """Keep the module sharded; forked ranks hand full weights back to the launching process.

        Lightning's launcher takes them from the module's `state_dict` after this.
        """
        super().release()
        self._in_fit = False
        states = self.states
        if states is not None and isinstance(self._strategy.launcher, OrderlyLauncher):
            states.gather_from_here(keep=self._strategy.local_rank == 0)

    @override
    def set_up_evaluation(self, trainer: pl.Trainer, setup: Callable[[pl.Trainer], None]) -> None:
        if self.states is None:
            setup(trainer)
            return
        # as Lightning does, without broadcasting rank 0's shards to the other ranks
        strategy = self._strategy
        assert strategy.accelerator is not None, "the Trainer has chosen one"
        strategy.accelerator.setup(trainer)
        strategy.precision_plugin.convert_module(strategy.module)
        strategy.module.to(strategy.root_device)
        strategy.setup_precision_plugin()

    # -- in a fit

    @override
    def accumulating(self) -> AbstractContextManager[None]:
        """Keep full gradients, as large as the model, on this rank in the body."""
        return accumulating(self._strategy.module)

    @override
    def after_backward(self, steps: bool) -> None:
        """Count the bytes that FSDP has sent for a forward and its backward."""
        gathered, scattered = self._step_bytes
        ledger = self._strategy.group_ledger
        ledger.count_sent(GATHER_TAG, gathered)
        if steps:
            ledger.count_sent(SCATTER_TAG, scattered)

    # -- states

    @override
    def whole_module(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        states = self.states
        if states is None or not self.saves_folders:
            return super().whole_module(read)
        return states.sharded_state_dict() if self._takes_part() else {}

    @override
    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        states = self.states
        if states is None or not self.saves_folders:
            return super().whole_optimizer(optimizer, state)
        return states.sharded_optimizer_state(optimizer) if self._takes_part() else {}

    @override
    def _read(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read no more than this rank's shards where the model is sharded already."""
        if self.states is None:
            return super()._read(state)
        held = self._strategy.module.state_dict()
        return {name: _read_like(value, held.get(name)) for name, value in state.items()}

    @override
    def _read_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        return {
            **state,
            "state": {
                index: {
                    key: _read_like(value, parameters.get(index)) for key, value in saved.items()
                }
                for index, saved in state["state"].items()
            },
        }


def _read_like(value: Any, like: Any) -> Any:
    """Return a value of a checkpoint; of a tensor in a folder the shard that `like` is."""
    return value.read(like) if isinstance(value, FolderTensor) else value
