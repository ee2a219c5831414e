"""A replica that is a tensor group: Domino inside, and between an algorithm that does not know it.

The algorithm asks a parameter whether it is a part (`comm.parts`); all others are equal on all
ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_commfree.comm.mesh import REPLICA, Mesh, tensor_mesh
from lightning_commfree.comm.parts import mark_part
from lightning_commfree.comm.replica_channels import ReplicaChannels
from lightning_commfree.domino import DominoSettings, check_states
from lightning_commfree.strategies.inside.domino import TensorParallel

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class TensorReplica(TensorParallel):
    """Ranks of a replica share its model.

    Args:
        strategy: whose ranks.
        settings: of Domino.
        argument: what the user calls a replica's size.
    """

    def __init__(self, strategy: ReplicaStrategy, settings: DominoSettings, argument: str) -> None:
        super().__init__(strategy, settings)
        self._argument = argument
        self._accumulates = self._seen = False

    @override
    def mesh(self, world_size: int) -> Mesh:
        return tensor_mesh(world_size, self.size, self._argument, REPLICA)

    @override
    def prepare(self, strategy: ReplicaStrategy, channels: ReplicaChannels) -> None:
        """Divide the model, and let parameters say which of them are parts.

        Raises:
            ValueError: some ranks hold the same part, and others another one.
        """
        super().prepare(strategy, channels)
        assert self.sharded is not None, "it has been divided"
        for name, parameter, _, spec in self.sharded.held():
            held = set(() if spec is None else spec.ranges)
            if spec is not None and 1 < len(held) < len(spec.ranges):
                raise ValueError(
                    f"{name!r} is divided into {len(held)} parts among {self.size} ranks: several"
                    " of them hold the same one, as key heads that are fewer than ranks. With"
                    f" `inside='domino'` choose `{self._argument}` up to {len(held)}."
                )
            mark_part(parameter, len(held) > 1)

    @override
    def release(self) -> None:
        for held in () if self.sharded is None else self.sharded.held():
            mark_part(held.tensor, False)
        super().release()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @override
    def accumulating(self) -> AbstractContextManager[None] | None:
        return self._accumulating()

    @override
    def after_backward(self) -> None:
        """Add up the gradients of what several ranks use in part, if a step follows.

        Raises:
            ValueError: an optimizer keeps something else than numbers for single elements.
        """
        if self.sharded is None or self._accumulates:
            return
        self.sharded.sum_shared_gradients()
        if not self._seen and any(one.state for one in self._strategy.optimizers):
            self._seen = True
            check_states(self._strategy.optimizers, self.sharded.specs.keys())

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what each rank of the group keeps for itself."""
        return {} if self.sharded is None else self.sharded.own_state()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.sharded is not None:
            self.sharded.load_own_state(state)
