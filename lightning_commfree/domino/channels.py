"""The channels of a job that is data parallel times tensor parallel."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.mesh import DATA, TENSOR, tensor_mesh


class Channels(NamedTuple):
    """One rank's.

    Attributes:
        world: to all ranks, of host memory.
        tensor: to the ranks that share its model.
        data: to the ranks with the same part of it.
    """

    world: Channel
    tensor: Channel
    data: Channel

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        tensor_parallel_size: int,
        ledger: Ledger,
        backend: str,
        timeout: timedelta | None,
        device: torch.device,
        liveness: bool = True,
    ) -> Channels:
        """Make the process groups; collective over the `size` ranks of the job."""
        mesh, near = tensor_mesh(size, tensor_parallel_size), (ledger, backend, timeout, device)
        everybody = [list(range(size))]
        world = Channel.open(everybody, rank, ledger, timeout=timeout, liveness=liveness)
        # the wider channel knows who is gone where a group only sees a member leave
        tensor, data = (
            Channel.open(mesh.groups(axis), rank, *near, wider=world, liveness=liveness)
            for axis in (TENSOR, DATA)
        )
        return cls(world, tensor, data)

    def close(self) -> None:
        """Give the process groups back."""
        for channel in (self.tensor, self.data, self.world):
            channel.close()
