"""Layout for tensor parallelism with Domino, used by `DominoTPStrategy` and `inside="domino"`.

The model is sharded before the optimizer is created, and every rank has the full model again after
the fit. The algorithms of the other strategies do not depend on Domino; they only check whether a
parameter is a shard (`model.shards.is_shard`). All other parameters are the same on all ranks of
the tensor group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.job import DATA, REPLICA, Mesh, tensor_mesh
from lightning_commfree.domino import (
    DominoSettings,
    OptimizerShards,
    ShardedModule,
    check_module,
    check_states,
    refuse_nonfinite_weights,
)
from lightning_commfree.fit.checks import refuse_compiled, refuse_manual
from lightning_commfree.host import TrainerStatus
from lightning_commfree.layouts.sharded import ShardedReplica

_WHY_NOT_MANUAL = (
    "ranks that share a model combine and check gradients once per step, right after its only"
    " backward, but manual optimization may call backward and step any number of times per batch"
)


class TensorParallel(ShardedReplica):
    """Layout for tensor parallelism: every layer is sharded across a tensor group's ranks.

    `argument` is the name of the strategy's argument that sets the group size, used in error
    messages. `outside` names the mesh axis across tensor groups: `DATA` for `DominoTPStrategy`,
    `REPLICA` for the other strategies. `sharded` is the sharded model between `prepare` and
    `release`, otherwise None.
    """

    same_batch = True

    def __init__(
        self,
        settings: DominoSettings,
        argument: str = "tensor_parallel_size",
        outside: str = DATA,
    ) -> None:
        super().__init__(settings)
        # None: all ranks of a node, which `DominoTPStrategy` knows once the Trainer has its devices
        self.size = settings.tensor_parallel_size or 1
        self._argument, self._outside = argument, outside
        self.sharded: ShardedModule | None = None
        # from the latest fit: optimizer states remain sharded after it
        self._last_optimizer_shards: OptimizerShards | None = None
        self._states_checked = False

    @property
    @override
    def shards(self) -> ShardedModule | None:
        """The sharded model from `prepare` to `release`, otherwise None."""
        return self.sharded

    @override
    def mesh(self, world_size: int) -> Mesh:
        return tensor_mesh(world_size, self.size, self._argument, self._outside)

    # -- before and after a fit

    @override
    def check(self) -> None:
        """Raise a `ValueError` for settings and modules that Domino does not support."""
        super().check()
        name, module = self.fit.strategy, self.fit.module
        refuse_manual(name, module, _WHY_NOT_MANUAL)
        refuse_compiled(name, module)
        check_module(name, module, self.size)

    @override
    def prepare(self) -> None:
        """Copy rank 0's weights, and shard the model on this rank's device; collective.

        `refuse_partly_shared` raises a `ValueError` for a shard that several ranks hold, but not
        all.
        """
        fit = self.fit
        module, within = fit.module, fit.channels.within
        own_seed = torch.initial_seed() % 2**31
        seed = self._start()
        self.sharded = ShardedModule.prepare(module, within, self._settings, own_seed, seed)
        for model in self.sharded.models:
            model.on_fallback = cache(rank_zero_warn)  # each message only once
            model.trial.on_choice = rank_zero_info
        module.to(fit.device)
        if self._outside == REPLICA:
            self.sharded.refuse_partly_shared(self._argument)
        self.sharded.mark_shards()
        clip = self.sharded.clip_gradients  # Lightning would clip by the norm of a rank's shards
        fit.patches.put(fit.precision, "clip_grad_by_norm", clip)

    @override
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a `ValueError` for unfit optimizers; their states are checked later."""
        super().check_optimizers(optimizers)
        self._states_checked = False

    @override
    def release(self) -> None:
        """Restore the full model on every rank; collective, except after Ctrl-C."""
        if self.sharded is not None:
            self._last_optimizer_shards = None
            self.sharded.unmark_shards()
            if self.fit.trainer.state.status != TrainerStatus.INTERRUPTED:
                self.sharded.unshard()
                self._last_optimizer_shards = self.sharded.optimizer_shards
            self.sharded = None

    # -- in a fit

    @contextmanager
    @override
    def backward(self, steps: bool) -> Iterator[None]:
        """Context manager that sums gradients of shared shards, and partial sums, before a step.

        Before the second step, `check_states` raises a `ValueError` for state that is not
        element-wise.
        """
        yield
        if self.sharded is None or not steps or self.size == 1:
            return
        self.sharded.sum_shared_gradients()
        # the first step creates optimizer states, so they are checked before the second
        if not self._states_checked and any(one.state for one in self.fit.optimizers()):
            self._states_checked = True
            check_states(self.fit.optimizers(), self.sharded.specs.keys())

    @override
    def grad_norm(self, module: nn.Module, norm_type: float) -> Tensor:
        """Return the p-norm of the full model's gradient; collective within the replica."""
        if self.sharded is None:
            return super().grad_norm(module, norm_type)
        return self.sharded.gradient_norm(module.parameters(), norm_type)

    # -- states

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state that differs between the group's ranks (`ShardedModule.own_state`)."""
        return {} if self.sharded is None else self.sharded.own_state()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore what differs between the group's ranks (`ShardedModule.own_state`)."""
        if self.sharded is not None:
            self.sharded.load_own_state(state)
        return []

    @override
    def module_state_to_save(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's full state on rank 0; collective over all ranks.

        If a rank's weights are not finite, a `RuntimeError` is raised on all ranks.
        """
        fit = self.fit
        if self.sharded is not None and not fit.ranks.interrupted:
            steps = fit.trainer.global_step
            refuse_nonfinite_weights(fit.channels.world, fit.module, steps, self.size)
        return super().module_state_to_save(read)

    @override
    def optimizer_state_to_save(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's full state on rank 0, also after a fit; collective.

        State that is not element-wise raises a `ValueError`.
        """
        if self.sharded is not None and self.size > 1:
            check_states([optimizer], self.sharded.specs.keys())
        if self.sharded is not None or self._last_optimizer_shards is None:
            return super().optimizer_state_to_save(optimizer, state)
        if self.fit.ranks.interrupted:
            return {}
        with self.fit.ranks.with_channels() as channels:
            return self._last_optimizer_shards.full_state_dict(
                optimizer, channels.within, self._keeps
            )
