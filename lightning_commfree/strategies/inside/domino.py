"""A replica whose ranks hold shards of one model: tensor parallelism, scheduled as Domino does.

The model is sharded before the optimizer is made, and full again on every rank after the fit.

Between replicas is either a mean of gradients that knows Domino, or an algorithm that does not. The
latter asks each parameter whether it is a shard (`model.shards.is_part`); all others are equal on
all ranks of the tensor group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.job import DATA, REPLICA, Mesh, tensor_mesh
from lightning_commfree.domino import (
    DominoSettings,
    OptimizerParts,
    ShardedModule,
    check_module,
    check_states,
    refuse_meta,
    refuse_nonfinite_weights,
)
from lightning_commfree.model.replication import share_random_state
from lightning_commfree.strategies.checks import refuse_compiled, refuse_manual
from lightning_commfree.strategies.inside.sharded import DividedModel

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

_WHY_NOT_MANUAL = (
    "ranks that share a model combine and check their gradients once per step, right after its one"
    " backward, and manual optimization may call backward and step any number of times per batch"
)


class TensorParallel(DividedModel):
    """Ranks of a tensor group share a model.

    Args:
        strategy: whose ranks.
        settings: of Domino.
        argument: what the user calls the size of a group.
        outside: the axis between groups: `REPLICA` for an algorithm that does not know Domino.

    Attributes:
        sharded: the sharded model, from `prepare` to `release`.
    """

    same_batch = True

    def __init__(
        self,
        strategy: ReplicaStrategy,
        settings: DominoSettings,
        argument: str = "tensor_parallel_size",
        outside: str = DATA,
    ) -> None:
        super().__init__(strategy, settings)
        self._argument, self._outside = argument, outside
        self.sharded: ShardedModule | None = None
        self._left: OptimizerParts | None = None  # by the latest fit
        self._seen = False  # what optimizers keep

    @property
    def size(self) -> int:  # type: ignore[override]
        """Ranks that share a model."""
        return self._settings.tensor_parallel_size or self._strategy.num_processes

    @property
    @override
    def states(self) -> ShardedModule | None:
        return self.sharded

    @override
    def mesh(self, world_size: int) -> Mesh:
        return tensor_mesh(world_size, self.size, self._argument, self._outside)

    # -- before and after a fit

    @override
    def check_before_launch(self, trainer: pl.Trainer | None) -> None:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.mesh(self._strategy.world_size)
            if not _may_change(self._strategy.module):  # else `check` sees to it
                self.check(self._strategy, trainer)

    @override
    def check(self, strategy: ReplicaStrategy, trainer: pl.Trainer) -> None:
        super().check(strategy, trainer)
        name, module = type(strategy).__name__, strategy.module
        refuse_manual(name, module, _WHY_NOT_MANUAL)
        refuse_compiled(name, module)
        check_module(name, module, self.size)

    @override
    def prepare(self, strategy: ReplicaStrategy) -> None:
        """Shard the model, and put this rank's shards on its device, which need not hold all of it.

        Raises:
            ValueError: some ranks hold the same part, and others another one.
        """
        module, within = strategy.module, strategy.channels.within
        own_seed = torch.initial_seed() % 2**31
        seed = self._start()
        self.sharded = ShardedModule.prepare(module, within, self._settings, own_seed, seed)
        for model in self.sharded.models:
            model.on_fallback = cache(rank_zero_warn)  # of each text once
            model.trial.on_choice = rank_zero_info
        module.to(strategy.root_device)
        if self._outside == REPLICA:
            self.sharded.mark_parts(self._argument)

    @override
    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        super().begin(optimizers)
        strategy, self._seen = self._strategy, False
        assert self.sharded is not None, "`prepare` has run"
        clip = self.sharded.clip_gradients  # Lightning clips by the norm of what a rank holds
        strategy.patches.put(strategy.precision_plugin, "clip_grad_by_norm", clip)

    @override
    def release(self) -> None:
        """Give every rank the full model again; collective, except after Ctrl-C."""
        if self.sharded is not None:
            self._left = None
            self.sharded.forget_parts()
            if self._strategy.module.trainer.state.status != TrainerStatus.INTERRUPTED:
                self.sharded.join()
                self._left = self.sharded.optimizer_parts
            self.sharded = None
        super().release()

    @override
    def set_up_evaluation(self, trainer: pl.Trainer, setup: Callable[[pl.Trainer], None]) -> None:
        refuse_meta(type(self._strategy).__name__, self._strategy.module)
        setup(trainer)

    # -- in a fit

    @override
    def train_begins(self) -> None:
        # from here on the ranks of a tensor group draw the same numbers; in a resumed fit they have
        # those that came after the save
        strategy = self._strategy
        share_random_state(strategy.channels.within, strategy.module.device)

    @override
    def check_first(self, verb: str, batch: Any) -> None:
        """See that the ranks of a tensor group have the same first batch to train or validate."""
        if self.sharded is not None:
            self.sharded.check_first(verb, batch)

    @override
    def after_backward(self, steps: bool) -> None:
        """Add up the gradients of what several ranks use in part, if a step follows.

        Raises:
            ValueError: an optimizer keeps something else than numbers for single elements.
        """
        if self.sharded is None or not steps:
            return
        self.sharded.sum_shared_gradients()
        if not self._seen and any(one.state for one in self._strategy.optimizers):
            self._seen = True
            check_states(self._strategy.optimizers, self.sharded.specs.keys())

    # -- states

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what each rank of the group keeps for itself."""
        return {} if self.sharded is None else self.sharded.own_state()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.sharded is not None:
            self.sharded.load_own_state(state)

    @override
    def whole_module(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's full state on rank 0; collective over all ranks.

        Raises:
            RuntimeError: some rank's weights are not finite; on all ranks.
        """
        strategy = self._strategy
        if self.sharded is not None and not strategy.ranks.interrupted:
            steps = strategy.module.trainer.global_step
            refuse_nonfinite_weights(strategy.channels.world, strategy.module, steps, self.size)
        return super().whole_module(read)

    @override
    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's full state on rank 0; after a fit as well.

        Each rank's optimizer then holds its part, as in the fit.

        Raises:
            ValueError: it keeps something else than numbers for single elements.
        """
        if self.sharded is not None and self.size > 1:
            check_states([optimizer], self.sharded.specs.keys())
        if self.sharded is not None or self._left is None:
            return super().whole_optimizer(optimizer, state)
        if self._strategy.ranks.interrupted:
            return {}
        with self._strategy.ranks.with_channels() as channels:
            return self._left.whole_state_dict(optimizer, channels.within, self._keeps)


def _may_change(module: pl.LightningModule) -> bool:
    """Return whether hooks that run once the ranks are there may make or change the model."""
    names = ("configure_model", "configure_sharded_model", "setup")
    return any(is_overridden(name, module, pl.LightningModule) for name in names)
