"""Layout for `inside="fsdp"`: shards a replica's model with FSDP2 (`layouts.fsdp`).

As with Lightning's own strategies for sharded models, the module remains sharded after the fit, and
`trainer.test` uses the sharded module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import Mesh, replica_mesh
from lightning_commfree.fit.checks import refuse_manual
from lightning_commfree.layouts.fsdp import (
    FSDPSettings,
    Policies,
    apply_fsdp,
    choose_policies,
    reducing_gradients,
    step_bytes,
    why_unavailable,
)
from lightning_commfree.layouts.sharded import ShardedReplica
from lightning_commfree.model.meta_init import Materializer, on_meta
from lightning_commfree.model.replication import broadcast_initial_weights, refuse_sync_batchnorm
from lightning_commfree.model.shards import RowShards, local_tensor, refuse_wrapped
from lightning_commfree.resume.checkpoint_io import AtomicCheckpointIO
from lightning_commfree.resume.folders import FolderTensor

# tags in the group's ledger; bytes are computed, because FSDP itself does the communication
GATHER_TAG, SCATTER_TAG = "fsdp_gather", "fsdp_scatter"
NORM_TAG = "fsdp_norm"  # exchanged in this file, so its bytes are measured

_WHY_NOT_MANUAL = (
    "FSDP (`inside='fsdp'`) treats `training_step` as the model's forward and expects backward"
    " after it, but manual optimization calls backward inside it"
)


class FullyShard(ShardedReplica):
    """Layout that shards parameters, gradients and optimizer states across a replica's ranks.

    `argument` is the name of the strategy's argument that sets `size`, used in errors. If torch is
    too old, a `ValueError` is raised.
    """

    def __init__(self, size: int, argument: str, settings: FSDPSettings) -> None:
        if why := why_unavailable():
            raise ValueError(f"`inside='fsdp'` is unavailable: {why}, or set `inside='ddp'`.")
        super().__init__(settings)
        self.size, self._argument = size, argument
        self._sharded: nn.Module | None = None
        # the channel that `_sharded` uses; kept so that forked workers close its sockets
        self._kept: Channel | None = None
        self._policies: Policies = {}  # of `_sharded`
        self._step_bytes, self._in_fit = (0, 0), False

    @property
    @override
    def shards(self) -> RowShards | None:
        """The sharded model; None before it is sharded, and if another module was sharded."""
        sharded = self._sharded
        if sharded is None or sharded is not self.fit.module:  # from an earlier fit
            return None
        return RowShards(sharded)

    @property
    @override
    def saves_folders(self) -> bool:
        """Whether the fit's model exceeds `folder_above_bytes`, and no user's plugin writes."""
        limit = self._settings.folder_above_bytes
        if limit is None or not self._in_fit:
            return False
        parameters = self.fit.module.parameters()
        # a user's own plugin always writes files
        ours = type(self.fit.checkpoint_io) is AtomicCheckpointIO
        return ours and sum(p.numel() * p.itemsize for p in parameters) > limit

    @override
    def mesh(self, world_size: int) -> Mesh:
        return replica_mesh(world_size, self.size, self._argument)

    # -- before a fit

    @override
    def check(self) -> None:
        """Raise a `ValueError` for settings and modules that FSDP does not support."""
        super().check()
        refuse_manual(self.fit.strategy, self.fit.module, _WHY_NOT_MANUAL)
        if self.fit.module is not self._sharded:
            refuse_wrapped(self.fit.strategy, self.fit.module)

    @override
    def prepare(self) -> None:
        """Copy rank 0's weights, and shard the model unit by unit on the device; collective."""
        module, device = self.fit.module, self.fit.device
        refuse_sync_batchnorm(self.fit.strategy, module)
        channels, fingerprint = self.fit.channels, self.fit.fingerprint
        if module is self._sharded and self._kept is not None and self._kept.interrupted:
            raise RuntimeError(
                "An error ended the fit that sharded this model, so its ranks can no longer"
                " communicate with each other. Build a new model and load a checkpoint into it."
            )
        if module is self._sharded:  # an earlier fit sharded it
            broadcast_initial_weights(channels.world, module, fingerprint, channels.between)
        else:
            was_on_meta, seed = bool(on_meta(module)), self._start()
            materializer = Materializer(module, seed) if was_on_meta else None
            mixed = self.fit.precision.precision == "bf16-mixed"
            self._policies = choose_policies(module, self._settings, bf16_mixed=mixed)
            group = channels.within.keep_group()
            apply_fsdp(module, group, device, self._policies, materializer)
            self._sharded, self._kept = module, channels.within
            # ranks may have read values from different disks
            if materializer is not None and materializer.reads_folder:
                broadcast_initial_weights(channels.world, module, fingerprint, channels.between)
        module.to(device)

    @override
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a `ValueError` for unfit optimizers; compute the bytes that a step sends."""
        super().check_optimizers(optimizers)
        self._step_bytes = step_bytes(self.fit.module, self._policies)
        self._in_fit = True

    @override
    def release(self) -> None:
        """Leave the module sharded, but make forked ranks return full weights to the launcher."""
        self._in_fit = False
        shards = self.shards
        if shards is not None and self.fit.returns_weights:
            shards.gather_in_state_dict(keep=self.fit.trainer.local_rank == 0)

    # -- in a fit

    @contextmanager
    @override
    def backward(self, steps: bool) -> Iterator[None]:
        """Context manager in which FSDP reduces gradients only if a step follows.

        Otherwise, this rank accumulates full gradients. At the end, it counts the bytes that FSDP
        has sent in the batch's forward and backward passes.
        """
        with reducing_gradients(self.fit.module, steps):
            yield
        gathered, scattered = self._step_bytes
        ledger = self.fit.channels.within.ledger
        ledger.count_sent(GATHER_TAG, gathered)
        if steps:
            ledger.count_sent(SCATTER_TAG, scattered)

    @override
    def grad_norm(self, module: nn.Module, norm_type: float) -> Tensor:
        """Return the p-norm of the full gradient, from those of all shards; collective."""
        # torch's norm of `DTensor`s fails for an infinite p where a rank's shard is empty
        within = self.fit.channels.within
        gradients = [local_tensor(p.grad) for p in module.parameters() if p.grad is not None]
        own = get_total_norm([one for one in gradients if one.numel()], norm_type)
        all_ranks = within.all_gather(own.to(within.device), NORM_TAG).wait()
        norm: Tensor = torch.linalg.vector_norm(all_ranks, norm_type)
        return norm.to(own.device)

    # -- states

    @override
    def module_state_to_save(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return `DTensor`s if checkpoints are folders, else full tensors on rank 0; collective."""
        shards = self.shards
        if shards is None or not self.saves_folders:
            return super().module_state_to_save(read)
        return shards.sharded_state_dict() if self._gathers() else {}

    @override
    def optimizer_state_to_save(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state as `module_state_to_save` does; collective."""
        shards = self.shards
        if shards is None or not self.saves_folders:
            return super().optimizer_state_to_save(optimizer, state)
        return shards.sharded_optimizer_state(optimizer) if self._gathers() else {}

    @override
    def _read_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a module's state read from a folder; if sharded, only this rank's shards."""
        if self.shards is None:
            return super()._read_module_state(state)
        held = self.fit.module.state_dict()
        return {name: _read_like(value, held.get(name)) for name, value in state.items()}

    @override
    def _read_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Load an optimizer's state from a folder, only this rank's shards."""
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
    """Read a tensor from a checkpoint folder; if `like` is a shard, read only that shard."""
    return value.read(like) if isinstance(value, FolderTensor) else value
