"""How a process joins the others of its job, and reaches them until it leaves.

How the ranks of a job are laid out: axis names, sizes, and who shares a group with whom.

A mesh is integers only. `torch.distributed.device_mesh` is not used to build the groups because,
in the oldest torch that we support, it gives one backend to all axes of a device type, while our
axes differ: `replica` and `worker` cross the slow link (gloo, CPU buffers), `data` and `tensor`
stay inside a node (nccl). `Channel.open` turns a list of groups into process groups with the
backend that fits the axis.

The channels of a job whose ranks form replicas: to all, between replicas, within one.

The process group of all ranks, where the framework's own way to make it does not do.

It sends nothing by itself: what goes through it is the framework's.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.sockets import GlooInterface, Unshared, unreachable

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


StoreError = dist.DistStoreError  # other ranks have not come until the timeout
PATIENCE: timedelta = dist.constants.default_pg_timeout  # of groups of which nobody says more


_LAST_DROPS_S = 0.05


def leave_time_at_exit() -> None:
    """Let this process end a moment later, once gloo's threads hold nothing of Python's.

    A thread of gloo's may be the last to hold a collective that is over. To drop its tensors it
    waits for the interpreter's lock. If the interpreter is torn down by then, the thread is ended
    in the midst of C++, and the process is aborted behind a good fit. Frameworks leave gloo's
    groups open to the end.
    """
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    if dist.is_initialized():
        time.sleep(_LAST_DROPS_S)  # without the lock


def default_backend(device: torch.device) -> str:
    """Return the backend of process groups for tensors on a device."""
    return str(dist.get_default_backend_for_device(device))


def attempt() -> int:
    """Return how often torchrun has restarted this job; 0 without torchrun or a restart."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0  # every attempt has a store of its own
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_restarted_world(
    backend: str, rank: int, size: int, timeout: timedelta | None, device: torch.device
) -> None:
    """Make the default process group of a job that torchrun has restarted.

    1. torchrun keeps one store through all attempts. In it stand the addresses of ranks of the
       attempt before, which are gone.
    2. Ranks that look for each other find those and fail, or wait for their timeout.

    Here the keys of each attempt have a prefix of their own. Other jobs are left as they are.

    Args:
        backend: of the group.
        rank: of this process.
        size: of the world.
        timeout: of the group; None for torch's.
        device: of this rank; nccl is bound to it.
    """
    if not attempt() or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timeout or dist.constants.default_pg_timeout
    agents = dist.TCPStore(host, port, size, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"attempt_{attempt()}", agents)  # type: ignore[attr-defined]
    bound: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, **bound
    )


SILENCE_S = 60.0  # a rank that is alone with what it begins says so after it


@dataclass(frozen=True)
class Member:
    """This process among the others of its job.

    Attributes:
        rank: global rank.
        size: ranks of the job.
        timeout: of an exchange.
        backend: of process groups on the rank's device.
        device: of the rank.
        meeting_point: address of the main machine, where there are several.
    """

    rank: int
    size: int
    timeout: timedelta
    backend: str
    device: torch.device
    meeting_point: str | None


class Network:
    """This process's way into a job, from `joining` to `leave`."""

    def __init__(self) -> None:
        self._sockets, self._interface = Unshared(), GlooInterface()
        self._channels: ReplicaChannels | None = None

    @property
    def channels(self) -> ReplicaChannels:
        """To all ranks, between replicas, within one.

        Raises:
            RuntimeError: they are not open.
        """
        if self._channels is None:
            raise RuntimeError("Channels are open between `setup_environment` and `teardown` only.")
        return self._channels

    @property
    def is_open(self) -> bool:
        """Whether the channels are."""
        return self._channels is not None

    @contextmanager
    def joining(self, member: Member) -> Iterator[None]:
        """Let the framework open its process group in the body.

        Raises:
            RuntimeError: machines do not reach each other; it says what to set.
        """
        if member.meeting_point is not None:
            self._interface.tell(member.meeting_point)
        leave_time_at_exit()
        try:
            # a rank that is killed is gone, whoever it has forked off
            with self._sockets.opening():
                join_restarted_world(
                    member.backend, member.rank, member.size, member.timeout, member.device
                )
                yield
        except RuntimeError as error:
            if member.meeting_point is not None and "gloo" in str(error).lower():
                raise RuntimeError(unreachable(error)) from error
            raise

    def open(
        self, mesh: Mesh, member: Member, ledgers: tuple[Ledger, Ledger], liveness: bool
    ) -> None:
        """Open the channels, if they are not; arguments as `ReplicaChannels.open` takes them.

        Raises:
            RuntimeError: some ranks have not come until the timeout.
        """
        if self._channels is None:
            near = Near(member.backend, member.device)
            with _waiting_for_all(member):
                self._channels = ReplicaChannels.open(
                    mesh, member.rank, ledgers, member.timeout, near, liveness=liveness
                )

    def naming_lost(self, what: str) -> AbstractContextManager[None]:
        """In the body, a collective of the framework's that fails names the rank that is gone."""
        if self._channels is None:
            return nullcontext()
        # a tensor on the wrong device fails here too, and is nobody's death
        return self._channels.world.naming_lost(what, computing=True)

    def leave(self) -> None:
        """Close the channels, and leave this process's environment as it was."""
        self._interface.take_back()
        if self._channels is not None:
            self._channels.close()
            self._channels = None


@contextmanager
def _waiting_for_all(member: Member) -> Iterator[None]:
    """In the body this rank waits for all others to begin the same."""
    if member.size == 1:
        yield
        return
    advice = (
        "`fit`, `validate`, `test` and `predict` must be called on all ranks, not under"
        f" `if rank == 0:`. The `timeout` is {member.timeout.total_seconds():g} s."
    )
    text = f"This rank waits for others to begin what it has begun. {advice}"
    timer = threading.Timer(SILENCE_S, warnings.warn, [text])
    timer.start()
    try:
        yield
    except StoreError as error:
        raise RuntimeError(f"Other ranks have not begun what this one has. {advice}") from error
    finally:
        timer.cancel()
        timer.join()  # a process that forks has no other thread then
