"""Parts of joining a job: the layout of its ranks, their channels, and the process group.

`strategies.ranks` puts them together.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.liveness import HEARTBEAT_SECONDS

REPLICA = "replica"
DATA = "data"
TENSOR = "tensor"

PATIENCE: timedelta = dist.constants.default_pg_timeout  # the timeout where the user gives none
SILENCE_S = 60.0  # a rank that waits alone for the others to start says so after it
_LAST_DROPS_S = 0.05  # for gloo's threads to drop the last tensors


# -- the layout of the ranks


@dataclass(frozen=True)
class Mesh:
    """The axes of a job, outermost first; integers only, no process groups.

    `axes=("replica", "data"), sizes=(2, 4)` puts ranks 0 to 3 into the first replica.
    """

    # Not `torch.distributed.device_mesh`: in the oldest torch that we support it gives one backend
    # to all axes of a device type, while `replica` crosses the slow link (gloo, CPU buffers) and
    # `data` and `tensor` stay inside a node (nccl).

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on `axis` only, each in ascending order."""
        index = self.axes.index(axis)
        stride = math.prod(self.sizes[index + 1 :])
        firsts = [rank for rank in range(math.prod(self.sizes)) if self.coordinate(rank, axis) == 0]
        return [[first + step * stride for step in range(self.sizes[index])] for first in firsts]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of `rank` on `axis`, counted from 0."""
        index = self.axes.index(axis)
        return rank // math.prod(self.sizes[index + 1 :]) % self.sizes[index]


def replica_mesh(world_size: int, replica_size: int, name: str = "replica_size") -> Mesh:
    """Lay out `world_size` ranks as replicas of `replica_size` consecutive ranks.

    Args:
        world_size: ranks of the job.
        replica_size: ranks of a replica.
        name: the user's name for `replica_size`, for the error.

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
    """Lay out `world_size` ranks as tensor groups of `size` consecutive ranks.

    Args:
        world_size: ranks of the job.
        size: ranks of a tensor group.
        name: the user's name for `size`, for the error.
        outside: the axis between groups.

    Raises:
        ValueError: `size` is not a positive divisor of `world_size`.
    """
    return Mesh(axes=(outside, TENSOR), sizes=replica_mesh(world_size, size, name).sizes)


@dataclass(frozen=True)
class Member:
    """This process as a rank of its job.

    Attributes:
        rank: global rank.
        size: number of ranks in the job.
        timeout: timeout of an exchange.
        backend: backend of process groups on the rank's device.
        device: device of the rank.
        main_address: address of rank 0's machine; None on a single machine.
    """

    rank: int
    size: int
    timeout: timedelta
    backend: str
    device: torch.device
    main_address: str | None


# -- the channels


@dataclass(frozen=True)
class ReplicaChannels:
    """One rank's channels.

    Attributes:
        world: channel between all ranks, for tensors in host memory.
        between: channel to the ranks at the same position in the other replicas.
        within: channel to the ranks of this replica; of size 1 if each rank is a replica.
    """

    world: Channel
    between: Channel
    within: Channel

    @classmethod
    def open(
        cls, mesh: Mesh, member: Member, ledgers: tuple[Ledger, Ledger], liveness: bool = True
    ) -> ReplicaChannels:
        """Make the process groups; collective over the job.

        Args:
            mesh: its first axis is between replicas, its second one within a replica.
            member: this rank.
            ledgers: ledgers of the bytes sent to other replicas, and within one.
            liveness: whether lost ranks are named; see `comm.liveness`.
        """
        (outside, inside), (replicas, size) = mesh.axes, mesh.sizes
        ledger, inner = ledgers
        rank, timeout = member.rank, member.timeout
        fast_between = outside == DATA  # both axes are within a node
        # where each rank is a replica, the world's channel is also the one between replicas
        alone = size == 1 and not fast_between
        world = Channel.open(
            [list(range(replicas * size))],
            rank,
            ledger,
            timeout=timeout,
            full_duplex=alone,
            liveness=liveness,
        )
        if alone:
            return cls(world, world, Channel([rank], rank, inner))

        def fast(axis: str, counted: Ledger) -> Channel:
            groups = mesh.groups(axis)
            return Channel.open(
                groups, rank, counted, member.backend, timeout, member.device, wider=world
            )

        if fast_between:  # the same order on all ranks: within first
            within = fast(inside, inner)
            return cls(world, fast(outside, ledger), within)
        # gloo and CPU buffers also for CUDA models: the slow link is Ethernet, and a second nccl
        # communicator on a device can deadlock with the first.
        groups = mesh.groups(outside)
        between = Channel.open(groups, rank, ledger, timeout=timeout, wider=world, full_duplex=True)
        return cls(world, between, fast(inside, inner))

    def close(self) -> None:
        """Destroy the process groups."""
        # `world` last: it ends the heartbeat, and other ranks must not see this one leave before
        for channel in dict.fromkeys((self.between, self.within, self.world)):
            channel.close()


@contextmanager
def waiting_for_all(member: Member) -> Iterator[None]:
    """Context manager that warns if other ranks do not join its collective; explains a timeout.

    Raises:
        RuntimeError: some ranks did not join within the timeout.
    """
    if member.size == 1:
        yield
        return
    advice = (
        "`fit`, `validate`, `test` and `predict` must be called on all ranks, not under"
        f" `if rank == 0:`. The `timeout` is {member.timeout.total_seconds():g} s."
    )
    text = f"This rank is waiting for the other ranks to start. {advice}"
    timer = threading.Timer(SILENCE_S, warnings.warn, [text])
    timer.start()
    try:
        yield
    except dist.DistStoreError as error:
        raise RuntimeError(f"Timed out waiting for the other ranks to start: {advice}") from error
    finally:
        timer.cancel()
        timer.join()  # so that a later fork finds no other thread


# -- the process group of the framework


def default_backend(device: torch.device) -> str:
    """Return the backend of process groups for tensors on a device."""
    return str(dist.get_default_backend_for_device(device))


def attempt() -> int:
    """Return how often torchrun has restarted this job; 0 without torchrun or a restart."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0  # every attempt has a store of its own
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_restarted_world(member: Member) -> None:
    """Make the default process group of a job that torchrun has restarted.

    1. torchrun keeps one store through all attempts. It still contains the addresses of the ranks
       of the previous attempt, which have ended.
    2. Ranks that look for each other find those and fail, or wait for their timeout.

    So the keys of each attempt get a prefix. Other jobs are left to the framework.
    """
    if not attempt() or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, member.size, is_master=False, timeout=member.timeout
    )
    store = dist.PrefixStore(f"attempt_{attempt()}", agents)  # type: ignore[attr-defined]
    bound: dict[str, Any] = {} if member.device.type == "cpu" else {"device_id": member.device}
    dist.init_process_group(
        member.backend,
        store=store,
        rank=member.rank,
        world_size=member.size,
        timeout=member.timeout,
        **bound,
    )


def leave_time_at_exit(hosts_store: bool) -> None:
    """Let this process end a moment later than its script.

    A gloo thread may be the last to hold a finished collective. To drop its tensors it waits for
    the interpreter's lock. If the interpreter is torn down by then, the thread is ended in the
    middle of C++, and the process is aborted after a good fit. Frameworks leave gloo's groups open
    to the end.

    Rank 0 often hosts the store: the other ranks get two heartbeats to read that it has left.
    """
    atexit.unregister(_wait)
    atexit.register(_wait, 2 * HEARTBEAT_SECONDS if hosts_store else _LAST_DROPS_S)


def _wait(seconds: float) -> None:
    if dist.is_initialized():
        time.sleep(seconds)  # without the lock
