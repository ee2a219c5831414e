"""A replica whose ranks hold parts of one model: tensor parallelism, scheduled as Domino does.

The model is divided before the optimizer is made, and whole again after the fit. In between
checkpoints hold whole states, put together one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.mesh import Mesh, tensor_mesh
from lightning_commfree.comm.replica_channels import ReplicaChannels
from lightning_commfree.comm.sharing import share_random_state
from lightning_commfree.domino import (
    DominoSettings,
    OptimizerParts,
    ShardedModule,
    check_module,
    refuse_nonfinite_weights,
)
from lightning_commfree.strategies.checks import (
    PARTS,
    refuse_callbacks,
    refuse_compiled,
    refuse_fp16,
    refuse_manual_optimization,
    refuse_timed_validation,
)
from lightning_commfree.strategies.contracts import Inside
from lightning_commfree.strategies.inside.divided_model import DividedModel

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class TensorParallel(Inside):
    """Ranks of a tensor group share a model.

    Args:
        strategy: whose ranks.
        settings: of Domino.

    Attributes:
        sharded: the divided model, from `prepare` to `release`.
    """

    divides = True
    same_batch = True
    moves_module = False  # `prepare` moves this rank's part

    def __init__(self, strategy: ReplicaStrategy, settings: DominoSettings) -> None:
        self._strategy, self._settings = strategy, settings
        self._model = DividedModel(strategy)
        self.sharded: ShardedModule | None = None
        self._left: OptimizerParts | None = None  # by the latest fit

    @property
    def size(self) -> int:  # type: ignore[override]
        """Ranks that share a model."""
        return self._settings.tensor_parallel_size or self._strategy.num_processes

    @property
    def restores_after_setup(self) -> bool:  # type: ignore[override]
        """As `DividedModel` says."""
        return self._model.restores_after_setup

    @override
    def mesh(self, world_size: int) -> Mesh:
        return tensor_mesh(world_size, self.size)

    # -- before and after a fit

    @override
    def check_before_launch(self, trainer: pl.Trainer | None) -> None:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.mesh(self._strategy.world_size)
            if not _may_change(self._strategy.module):  # else `check` sees to it
                self.check(self._strategy, trainer)

    @override
    def check(self, strategy: ReplicaStrategy, trainer: pl.Trainer) -> None:
        name, module = type(strategy).__name__, strategy.module
        refuse_timed_validation(name, trainer)
        refuse_compiled(name, module)
        refuse_manual_optimization(name, module)
        refuse_fp16(name, strategy.precision_plugin)
        check_module(name, module, self.size)
        if self.size > 1:
            refuse_callbacks(trainer, name, PARTS)

    @override
    def prepare(self, strategy: ReplicaStrategy, channels: ReplicaChannels) -> None:
        """Divide the model, and put this rank's part on its device, which need not hold the whole.

        Gradients are averaged as they come.
        """
        module, own_seed = strategy.module, torch.initial_seed() % 2**31
        seed = self._model.start(channels.world)
        self.sharded = ShardedModule.prepare(
            module, channels.within, self._settings, own_seed, seed
        )
        for model in self.sharded.models:
            model.fell_back = cache(rank_zero_warn)  # of each text once
            model.trial.chosen = rank_zero_info
        module.to(strategy.root_device)

    @override
    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        self._model.begin(optimizers)
        strategy = self._strategy
        assert self.sharded is not None, "`prepare` has run"
        clip = self.sharded.clip_gradients  # Lightning clips by the norm of what a rank holds
        strategy.patches.put(strategy.precision_plugin, "clip_grad_by_norm", clip)

    @override
    def release(self) -> None:
        """Make the model whole again; collective but after Ctrl-C."""
        if self.sharded is not None:
            self._left = None
            if self._strategy.module.trainer.state.status != TrainerStatus.INTERRUPTED:
                self.sharded.join()
                self._left = self.sharded.optimizer_parts
            self.sharded = None
        self._model.end()

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

    # -- states

    @override
    def whole_module(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the whole module's state on rank 0; collective, empty on the other ranks.

        For a checkpoint of a fit's it has stand-ins.

        Args:
            read: finds it in a module that is not divided.

        Raises:
            RuntimeError: some rank's weights are not finite; on all ranks.
        """
        strategy = self._strategy
        if self.sharded is None:
            return read()
        if not strategy.meets():  # after Ctrl-C
            return {}
        steps = strategy.module.trainer.global_step
        refuse_nonfinite_weights(strategy.channels.world, strategy.module, steps, self.size)
        return self.sharded.whole_state_dict(self._model.wholes())

    @override
    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0; collective, empty on the other ranks.

        After a fit as well, where each rank's optimizer holds its part, as in the fit.
        """
        strategy = self._strategy
        parts = self._left if self.sharded is None else self.sharded.optimizer_parts
        if parts is None:
            return state
        if not strategy.meets():  # after Ctrl-C
            return {}
        with strategy.ranks.reaching() as channels:
            return parts.whole_state_dict(optimizer, channels.within, self._model.wholes())

    @override
    def writing(self) -> AbstractContextManager[None]:
        return self._model.writing()

    @override
    def with_module_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint with this rank's parts of the module, in a fit."""
        if self.sharded is None:
            return checkpoint
        return {**checkpoint, "state_dict": self.sharded.part_state_dict(checkpoint["state_dict"])}

    @override
    def with_optimizer_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint with this rank's parts of the optimizers, in a fit."""
        if self.sharded is None:
            return checkpoint
        optimizers, states = self._strategy.optimizers, checkpoint["optimizer_states"]
        parts = self.sharded.part_optimizer_states(optimizers, states)
        return {**checkpoint, "optimizer_states": parts}


def _may_change(module: pl.LightningModule) -> bool:
    """Return whether hooks that run once the ranks are there may make or change the model."""
    names = ("configure_model", "configure_sharded_model", "setup")
    return any(is_overridden(name, module, pl.LightningModule) for name in names)
