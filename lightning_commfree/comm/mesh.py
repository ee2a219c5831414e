"""How the ranks of a job are laid out: axis names, sizes, and who shares a group with whom.

A mesh is integers only. `torch.distributed.device_mesh` is not used to build the groups because,
in the oldest torch that we support, it gives one backend to all axes of a device type, while our
axes differ: `replica` and `worker` cross the slow link (gloo, CPU buffers), `data` and `tensor`
stay inside a node (nccl). `Channel.open` turns a list of groups into process groups with the
backend that fits the axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REPLICA = "replica"
DATA = "data"
TENSOR = "tensor"


@dataclass(frozen=True)
class Mesh:
    """Axes of a job, outermost first.

    `axes=("replica", "data"), sizes=(2, 4)` puts ranks 0 to 3 into the first replica.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on `axis` only, each in ascending order."""
        index = self.axes.index(axis)
        stride = math.prod(self.sizes[index + 1 :])
        firsts = [rank for rank in range(math.prod(self.sizes)) if self.coordinate(rank, axis) == 0]
        return [[first + step * stride for step in range(self.sizes[index])] for first in firsts]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return where `rank` stands on `axis`, counted from 0."""
        index = self.axes.index(axis)
        return rank // math.prod(self.sizes[index + 1 :]) % self.sizes[index]


def replica_mesh(world_size: int, replica_size: int, name: str = "replica_size") -> Mesh:
    """Lay `world_size` ranks out as replicas of `replica_size` consecutive ranks.

    Args:
        world_size: ranks of the job.
        replica_size: ranks of a replica.
        name: what the user calls `replica_size`.

    Raises:
        ValueError: `replica_size` is not a positive divisor of `world_size`.
    """
    if replica_size < 1 or world_size % replica_size:
        divisors = [k for k in range(1, world_size + 1) if world_size % k == 0]
        raise ValueError(
            f"`{name}={replica_size}` does not divide the {world_size} ranks of this job."
            f" All groups have the same number of ranks: choose one of {divisors}."
        )
    return Mesh(axes=(REPLICA, DATA), sizes=(world_size // replica_size, replica_size))


def tensor_mesh(
    world_size: int, size: int, name: str = "tensor_parallel_size", outside: str = DATA
) -> Mesh:
    """Lay `world_size` ranks out as tensor groups of `size` consecutive ranks.

    Args:
        world_size: ranks of the job.
        size: ranks of a tensor group.
        name: what the user calls `size`.
        outside: the axis between groups.

    Raises:
        ValueError: `size` is not a positive divisor of `world_size`.
    """
    whole = replica_mesh(world_size, size, name)
    return Mesh(axes=(outside, TENSOR), sizes=whole.sizes)
