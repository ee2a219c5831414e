"""The channels of a job whose ranks form replicas: to all, between replicas, within one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.mesh import DATA, Mesh


@dataclass(frozen=True)
class Near:
    """How ranks of one replica reach each other: the fast link."""

    backend: str
    device: torch.device


@dataclass(frozen=True)
class ReplicaChannels:
    """One rank's.

    Attributes:
        world: to all ranks, of host memory.
        between: to the ranks at the same place in the other replicas.
        within: to the ranks of the same replica; of size 1 where each rank is one.
    """

    world: Channel
    between: Channel
    within: Channel

    @classmethod
    def open(
        cls,
        mesh: Mesh,
        rank: int,
        ledgers: tuple[Ledger, Ledger],
        timeout: timedelta | None,
        near: Near,
        liveness: bool = True,
    ) -> ReplicaChannels:
        """Make the process groups; collective over the job.

        gloo and CPU buffers also for CUDA models: the slow link is Ethernet, and a second nccl
        communicator on a device can deadlock with the first.

        Args:
            mesh: its first axis lies between replicas, and is near where it is `DATA`; its second
                one lies within.
            rank: of this process.
            ledgers: of what is sent to other replicas, and within one.
            timeout: of an exchange.
            near: the fast link.
            liveness: whether ranks find out who is gone; see `Channel.open`.
        """
        (outside, inside), (replicas, size) = mesh.axes, mesh.sizes
        ledger, inner = ledgers
        between_is_near = outside == DATA
        world = Channel.open(
            [list(range(replicas * size))],
            rank,
            ledger,
            timeout=timeout,
            full_duplex=size == 1 and not between_is_near,
            liveness=liveness,
        )
        if size == 1 and not between_is_near:
            return cls(world, world, Channel([rank], rank, inner))

        # the wider channel knows who is gone where a group only sees a member leave
        def reach(axis: str, counted: Ledger, fast: bool) -> Channel:
            backend, device = (near.backend, near.device) if fast else ("gloo", None)
            return Channel.open(
                mesh.groups(axis),
                rank,
                counted,
                backend,
                timeout,
                device,
                world,
                full_duplex=not fast,
                liveness=liveness,
            )

        if between_is_near:  # as the first ones to open, those within
            within = reach(inside, inner, fast=True)
            return cls(world, reach(outside, ledger, fast=True), within)
        between = reach(outside, ledger, fast=False)
        return cls(world, between, reach(inside, inner, fast=True))

    def close(self) -> None:
        """Give the process groups back."""
        for channel in dict.fromkeys((self.between, self.within, self.world)):
            channel.close()
