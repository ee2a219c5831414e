"""Lay out a job's ranks, open the channels between them, and initialize torch's process group."""

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

DEFAULT_TIMEOUT: timedelta = dist.constants.default_pg_timeout
WARN_AFTER_S = 20.0  # time to wait for the other ranks to start
_EXIT_DELAY_S = 0.05  # time for gloo's threads to free the last tensors


# -- the layout of the ranks


@dataclass(frozen=True)
class Mesh:
    """Arrangement of a job's ranks along named axes, listed from outermost to innermost.

    Unlike torch's `DeviceMesh`, it creates no process groups. For example,
    `axes=("replica", "data"), sizes=(2, 4)` puts ranks 0 to 3 into the first replica.
    """

    # We do not use `torch.distributed.device_mesh`: in the oldest torch that we support, all axes
    # of a device type have the same backend, but `replica` crosses the slow link (gloo, CPU
    # buffers), and `data` and `tensor` stay inside a node (nccl).

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks whose coordinates differ only along `axis`, in rank order."""
        index = self.axes.index(axis)
        stride = math.prod(self.sizes[index + 1 :])
        firsts = [rank for rank in range(math.prod(self.sizes)) if self.coordinate(rank, axis) == 0]
        return [[first + step * stride for step in range(self.sizes[index])] for first in firsts]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of `rank` along `axis`, counted from 0."""
        index = self.axes.index(axis)
        return rank // math.prod(self.sizes[index + 1 :]) % self.sizes[index]


def replica_mesh(world_size: int, replica_size: int, name: str = "replica_size") -> Mesh:
    """Lay out `world_size` ranks as replicas of `replica_size` consecutive ranks.

    Raise a ValueError, which calls `replica_size` by `name`, unless it is at least 1 and divides
    `world_size`.
    """
    if replica_size < 1 or world_size % replica_size:
        divisors = [k for k in range(1, world_size + 1) if world_size % k == 0]
        raise ValueError(
            f"The number of ranks in this job ({world_size}) is not divisible by"
            f" `{name}={replica_size}`. Every group must have the same number of ranks. Choose one"
            f" of {divisors}."
        )
    return Mesh(axes=(REPLICA, DATA), sizes=(world_size // replica_size, replica_size))


def tensor_mesh(
    world_size: int, size: int, name: str = "tensor_parallel_size", outside: str = DATA
) -> Mesh:
    """Lay out `world_size` ranks as tensor-parallel groups of `size` consecutive ranks.

    `outside` is the name of the outer axis, which runs across the groups. Raise a ValueError, which
    calls `size` by `name`, unless it is at least 1 and divides `world_size`.
    """
    return Mesh(axes=(outside, TENSOR), sizes=replica_mesh(world_size, size, name).sizes)


@dataclass(frozen=True)
class RankInfo:
    """This process's rank in the job, its device, and its connection settings."""

    rank: int  # global rank
    size: int  # number of ranks in the job
    timeout: timedelta  # timeout for a collective
    chosen_backend: str | None  # the user's choice for all groups on `device`, if any
    device: torch.device
    main_address: str | None  # address of rank 0's machine; None if there is only one machine
    main_port: int | None = None  # at which the ranks meet

    @property
    def backend(self) -> str:
        """Backend for process groups within a replica or node, which use tensors on `device`."""
        return self.chosen_backend or str(dist.get_default_backend_for_device(self.device))


# -- the channels


@dataclass(frozen=True)
class ReplicaChannels:
    """One rank's channels: across replicas, within its replica, and to all ranks."""

    world: Channel  # all ranks, for tensors in host memory
    between: Channel  # the ranks at the same position in the other replicas
    within: Channel  # the ranks of this replica; of size 1 if each rank is a replica
    one_model: bool = False  # `between` connects data-parallel groups, whose models are the same

    @classmethod
    def open(
        cls, mesh: Mesh, info: RankInfo, ledgers: tuple[Ledger, Ledger], liveness: bool = True
    ) -> ReplicaChannels:
        """Create the process groups and open this rank's channels; collective over all ranks.

        The first axis of `mesh` runs across replicas, and the second runs within a replica. The
        first of the two `ledgers` counts traffic on `world` and `between`, and the second counts
        traffic on `within`.
        """
        (outside, inside), (replicas, size) = mesh.axes, mesh.sizes
        ledger, inner = ledgers
        rank, timeout = info.rank, info.timeout
        fast_between = outside == DATA  # both axes are within a node
        # if each rank is a replica, the world's channel is also the cross-replica channel
        alone = size == 1 and not fast_between
        everyone = [list(range(replicas * size))]
        world = Channel.open(
            everyone, rank, ledger, timeout=timeout, full_duplex=alone, liveness=liveness
        )
        if alone:
            return cls(world, world, Channel([rank], rank, inner))

        def open_axis(axis: str, axis_ledger: Ledger) -> Channel:
            groups, backend, device = mesh.groups(axis), info.backend, info.device
            urgent = axis == TENSOR  # the model's kernels wait for its sums
            return Channel.open(
                groups, rank, axis_ledger, backend, timeout, device, parent=world, urgent=urgent
            )

        if fast_between:  # `within` first: all ranks must create groups in the same order
            within = open_axis(inside, inner)
            return cls(world, open_axis(outside, ledger), within, one_model=True)
        # use gloo and CPU buffers even for CUDA models: the slow link is Ethernet, and a second
        # nccl communicator on a device can deadlock with the first
        groups = mesh.groups(outside)
        between = Channel.open(
            groups, rank, ledger, timeout=timeout, parent=world, full_duplex=True
        )
        return cls(world, between, open_axis(inside, inner))

    def close(self, failed: bool = False) -> None:
        """Close the channels and destroy their groups; `failed`: an error ended this rank's fit."""
        # close `world` last: that ends the heartbeat, and this rank then counts as having left
        for channel in dict.fromkeys((self.between, self.within, self.world)):
            channel.close(failed)


@contextmanager
def waiting_for_all(info: RankInfo) -> Iterator[None]:
    """Context manager around the first collectives; warns if they wait for other ranks over 20 s.

    These collectives block until all ranks have started. It raises a RuntimeError if some ranks did
    not start within the timeout.
    """
    if info.size == 1:
        yield
        return
    advice = (
        "`fit`, `validate`, `test` and `predict` must be called on all ranks, not under"
        f" `if rank == 0:`. The `timeout` is {info.timeout.total_seconds():g} s."
    )
    try:
        with _warning_after(f"This rank is waiting for the other ranks to start. {advice}"):
            yield
    except dist.DistStoreError as error:
        raise RuntimeError(f"Timed out waiting for the other ranks to start: {advice}") from error


@contextmanager
def joining(info: RankInfo) -> Iterator[None]:
    """Context manager around the creation of the first process group; warns if it takes over 20 s.

    The creation blocks until all ranks have come. The warning names the address to which they
    connect, and how to start the others.
    """
    if info.size == 1:
        yield
        return
    host, port = info.main_address or "127.0.0.1", info.main_port
    text = (
        f"Rank {info.rank} is waiting until all {info.size} ranks have connected to {host}:{port}."
    )
    if info.main_address is None:
        text += " Start the others, with the same address and port."
    elif host in ("localhost", "127.0.0.1", "::1"):
        text += (
            " No other machine can reach this address, which is used if MASTER_ADDR is not set: set"
            " MASTER_ADDR on all machines to the address of the first one, MASTER_PORT to one port,"
            " and NODE_RANK to 0, 1, ..., or use torchrun."
        )
    else:
        text += (
            " Unless a launcher such as torchrun or srun starts the others, run the same command on"
            f" each machine with MASTER_ADDR={host} MASTER_PORT={port} and its own NODE_RANK, from"
            " 0 on."
        )
    with _warning_after(text):
        yield


@contextmanager
def _warning_after(text: str) -> Iterator[None]:
    """Context manager that warns with `text` if its block takes over `WARN_AFTER_S` seconds."""
    # explicit, or the line of the standard library that runs the function would be printed
    timer = threading.Timer(WARN_AFTER_S, warnings.warn_explicit, [text, UserWarning, __name__, 1])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that no other thread exists at a later fork


# -- the process group of the framework


def restart_count() -> int:
    """Return the number of times that torchrun has restarted this job; 0 without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0  # each attempt has its own store
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def world_backend(mesh: Mesh, info: RankInfo) -> str:
    """Return the backend of the default process group, which contains all ranks.

    With replicas on several machines, the backend is gloo, even for CUDA devices, unless the user
    has chosen one. nccl would connect all machines when the job starts, over an interface and ports
    of its own choice, and the framework's barriers and metrics would use these connections.
    """
    slow_link = info.main_address is not None and mesh.axes[0] == REPLICA
    return "gloo" if slow_link and info.chosen_backend is None else info.backend


def existing_backend() -> str | None:
    """Return the backend of the default process group; None if there is no such group yet."""
    return str(dist.get_backend()) if dist.is_initialized() else None


def join_restarted_world(info: RankInfo, backend: str) -> None:
    """Initialize the default process group if torchrun has restarted this job.

    torchrun uses the same key-value store for all attempts. Ranks would read the addresses of the
    previous attempt's ranks from it, and then fail or time out, so this function gives each
    attempt's keys a prefix. If the job was not restarted, it does nothing: the framework
    initializes the group.
    """
    if not restart_count() or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, info.size, is_master=False, timeout=info.timeout
    )
    store = dist.PrefixStore(f"attempt_{restart_count()}", agents)  # type: ignore[attr-defined]
    bound: dict[str, Any] = {} if info.device.type == "cpu" else {"device_id": info.device}
    dist.init_process_group(
        backend,
        store=store,
        rank=info.rank,
        world_size=info.size,
        timeout=info.timeout,
        **bound,
    )


def delay_exit(hosts_store: bool) -> None:
    """Make this process wait briefly when it exits, so that gloo's threads can finish.

    A gloo thread may hold the last reference to a finished collective, and it needs the GIL to free
    the tensors. If the interpreter has shut down by then, the process aborts after a successful
    fit. Frameworks keep gloo's groups open until the process exits.

    If this process hosts the job's store (`hosts_store`), the delay is two heartbeat intervals,
    so that the other ranks can learn from the store that this rank is exiting.
    """
    atexit.unregister(_sleep_at_exit)
    atexit.register(_sleep_at_exit, 2 * HEARTBEAT_SECONDS if hosts_store else _EXIT_DELAY_S)


def _sleep_at_exit(seconds: float) -> None:
    """Sleep before Python exits (`delay_exit`), unless the process group has been destroyed."""
    if dist.is_initialized():
        time.sleep(seconds)  # releases the interpreter's lock
