"""Layout with the full model on every rank of a replica."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_commfree.comm.job import Mesh, replica_mesh
from lightning_commfree.fit.checks import refuse_timed_validation
from lightning_commfree.fit.contracts import Layout
from lightning_commfree.model.meta_init import on_meta
from lightning_commfree.model.replication import (
    BucketOrder,
    broadcast_initial_weights,
    refuse_sync_batchnorm,
)


class DataParallel(Layout):
    """Layout with the full model on every rank of a replica; DDP averages their gradients.

    `argument` is the name of the strategy argument that sets `size`; error messages mention it.
    """

    def __init__(self, size: int = 1, argument: str = "replica_size") -> None:
        self.size, self._argument = size, argument
        # from `prepare` to `release`, with several ranks
        self._ddp: DistributedDataParallel | None = None
        self._order: BucketOrder | None = None  # only if bucket order affects rounding

    @override
    def check(self) -> None:
        """Raise a `ValueError` for validation at a time interval, and a model on `meta`."""
        refuse_timed_validation(self.fit.strategy, self.fit.trainer)
        if names := on_meta(self.fit.module):
            raise ValueError(
                f"The model is on the `meta` device ('{names[0]}' and {len(names) - 1} more tensors"
                " have no values), and `inside='ddp'` does not initialize it. Build the model on"
                f" the CPU, or shard it with `inside='fsdp'` and `{self._argument}` of 2 or more."
            )

    @override
    def prepare(self) -> None:
        """Copy rank 0's weights to all ranks, and wrap a replica's model in DDP; collective."""
        fit = self.fit
        refuse_sync_batchnorm(fit.strategy, fit.module)
        broadcast_initial_weights(fit.channels.world, fit.module, fit.fingerprint)
        if self.size > 1:
            self._ddp = ddp = fit.wrap_in_ddp()
            if self.size > 2 and not ddp.find_unused_parameters and not self._not_restored():
                self._order = BucketOrder(ddp)

    @override
    def mesh(self, world_size: int) -> Mesh:
        """Return the mesh: replicas on the first axis, the `size` ranks of each on the second."""
        return replica_mesh(world_size, self.size, self._argument)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return whether DDP will broadcast buffers next, and its order of buckets."""
        if self._ddp is None:
            return {}
        # whether DDP broadcasts buffers in the next forward; it does not while accumulating
        state = {"syncs_buffers": self._ddp.require_forward_param_sync}
        return state if self._order is None else {**state, "order": self._order.names}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the states that `state_dict` returned; collective."""
        if self._order is not None and "order" in state:
            self._order.restore(state["order"])
        if self._ddp is not None and "syncs_buffers" in state:
            self._ddp.require_forward_param_sync = state["syncs_buffers"]
        return self._not_restored()

    @override
    def release(self) -> None:
        """Drop the DDP wrapper, and stop recording its order of buckets."""
        if self._order is not None:
            self._order.close()
        self._order = self._ddp = None

    def _not_restored(self) -> list[str]:
        """Return messages about arguments of DDP whose effects a resume does not reproduce."""
        lost = []
        if self.fit.ddp_kwargs.get("static_graph") and self.size > 2:
            lost.append(
                "with `static_graph=True`, DDP sums gradients in another order in the first step"
                " after a resume"
            )
        if self.fit.ddp_kwargs.get("ddp_comm_hook") is not None:
            lost.append("the state of `ddp_comm_hook` is not saved")
        return lost
