"""Asynchronous collectives within a group of ranks, with accounting of bytes and wait times.

This is the only module in the package that calls `torch.distributed` collectives (FSDP2 calls its
own). Each collective method of `Channel` returns a `Pending` without blocking; to block, call its
`wait` immediately. A single-rank channel has the same interface and sends nothing.

Launch a channel's collectives from one thread, in the same order on all ranks; in this package,
the order depends only on the training step. You may wait for results in any order. Do not write to
an input before its result has arrived; in a single-rank channel, input and result may share memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commfree.comm.ledger import (
    Ledger,
    all_gather_bytes,
    all_to_all_bytes,
    broadcast_bytes,
    ring_all_reduce_bytes,
)
from lightning_commfree.comm.liveness import TAG as PEERS_TAG
from lightning_commfree.comm.liveness import Guard, PeerMonitor, PeerWatch, job_store
from lightning_commfree.comm.sockets import CloseOnFork

_FREE_S = 1.0  # how long `close` waits for gloo's threads once the job has ended

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """Future for the result of an in-flight transfer; keeps the transfer's buffers alive."""

    def __init__(self, resolve: Callable[[], T]) -> None:
        self._resolve: Callable[[], T] | None = resolve
        self._result: T

    @classmethod
    def here(cls, result: T) -> Pending[T]:
        """Return a `Pending` whose result is already available."""
        return cls(lambda: result)

    def wait(self) -> T:
        """Block until the result has arrived; later calls return the same object immediately.

        Raises:
            RuntimeError: the transfer failed, for example because a peer died or the channel's
                timeout expired. The message names the lost ranks.
        """
        if self._resolve is not None:
            self._result = self._resolve()
            self._resolve = None  # frees the transfer's buffers
        return self._result

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """Return a `Pending` whose result is `function`, applied to the result of this one.

        `function` runs once, in the thread that waits for its result.
        """
        return Pending(lambda: function(self.wait()))


class Channel:
    """One rank's endpoint for collectives within a group of ranks.

    Args:
        ranks: global ranks of the group; results are in ascending order of rank.
        rank: global rank of this process.
        ledger: records bytes sent and time spent waiting.
        group: the process group; None for a single-rank channel.
        device: device of inputs and results.
        downward: a second process group of the same ranks. All-gathers and all-to-alls use it for
            rows sent to lower ranks, and `group` for rows sent to higher ranks.

    Attributes:
        rank: index of this process among the sorted `ranks`, not its global rank.
        group: the process group, for libraries that communicate on it; None for a single rank.
        peers: detects lost ranks while this rank waits for a collective.
        interrupted: whether `interrupt` has made the groups unusable.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        ledger: Ledger,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        downward: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks = tuple(sorted(ranks))  # `new_group` sorts them too
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.ledger = ledger
        self.device = device or torch.device("cpu")
        self.group, self._downward = group, downward
        self.peers = PeerWatch(self.ranks, rank)  # `open` replaces it with one that has a heartbeat
        self._owns_monitor = self._keeps_group = self.interrupted = False
        self._sockets = CloseOnFork()
        assert (group is None) == (self.size == 1), "several ranks need a process group"

    @classmethod
    def open(
        cls,
        groups: Sequence[Sequence[int]],
        rank: int,
        ledger: Ledger,
        backend: str = "gloo",
        timeout: timedelta | None = None,
        device: torch.device | None = None,
        parent: Channel | None = None,
        full_duplex: bool = False,
        liveness: bool = True,
        urgent: bool = False,
    ) -> Channel:
        """Create the process groups and return this rank's channel; collective over all ranks.

        Args:
            groups: global ranks of each group. The list must be the same on all ranks and contain
                each rank once.
            rank: global rank of this process.
            ledger: records bytes sent and time spent waiting.
            backend: "gloo" for CPU tensors, "nccl" for tensors on `device`.
            timeout: timeout for a collective; None means torch's default.
            device: device of inputs and results under nccl.
            parent: an open channel that contains these ranks. The new channel shares its
                heartbeat, so that errors name the rank that failed first, even outside the group:
                if rank 1 exits because rank 2 of another group died, errors on this channel name
                rank 2. If None, the channel starts its own heartbeat.
            full_duplex: whether to create a second gloo group, so that large transfers use both
                directions of a slow link at the same time.
            liveness: whether errors name the lost ranks; off on all ranks if any rank passes False.
            urgent: whether nccl's kernels run at high priority; otherwise, the model's kernels may
                occupy the device first.
        """
        mine = None
        options = _high_priority_options(timeout) if urgent and backend == "nccl" else None
        sockets = CloseOnFork()
        with sockets.opening():
            for ranks in groups:
                group = downward = None
                if len(ranks) > 1:
                    make = partial(dist.new_group, list(ranks), timeout, backend, options)
                    splits = backend == "nccl" == dist.get_backend()
                    with nullcontext() if splits else _without_bound_device():
                        group = make()
                        downward = make() if full_duplex and backend == "gloo" else None
                if rank in ranks:
                    where = None if backend == "gloo" else device
                    mine = cls(ranks, rank, ledger, group, where, downward)
            assert mine is not None, f"rank {rank} is in none of the groups {groups}"
            limit = timeout or dist.constants.default_pg_timeout
            if parent is None:
                monitor = mine._start_monitor(liveness)
                mine._owns_monitor = True
            else:
                monitor = parent.peers.monitor
            # even for a single rank: a monitor's list of channels must be the same on all ranks
            mine.peers = PeerWatch(mine.ranks, rank, limit.total_seconds(), monitor)
        mine._sockets = sockets
        return mine

    @classmethod
    def of_all_ranks(cls, ledger: Ledger) -> Channel:
        """Open a channel between all ranks of torch's process group, for a slow link; collective.

        Raise a RuntimeError if there is no process group.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "There is no process group yet. Call `torch.distributed.init_process_group` first,"
                " in a script that torchrun starts."
            )
        ranks = list(range(dist.get_world_size()))
        return cls.open([ranks], dist.get_rank(), ledger, full_duplex=True)

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Start to sum `tensor` over the ranks, in place; return it as a `Pending`.

        Its shape must be the same on all ranks.
        """
        if self._is_single_rank():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, ring_all_reduce_bytes(tensor.nbytes, self.size))
        with self.peers.launching(tag):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return self._pending([work], tensor, tag)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Start to gather every rank's `tensor`, shape S; return a `Pending` of shape (size, *S).

        The shape must be the same on all ranks.
        """
        if self._is_single_rank():
            return Pending(lambda: tensor.unsqueeze(0))
        self.ledger.count_sent(tag, all_gather_bytes(tensor.nbytes, self.size))
        if self.device.type == "cuda":
            received = tensor.new_empty(self.size, *tensor.shape)
            with self.peers.launching(tag):
                work = dist.all_gather_into_tensor(
                    received, tensor.contiguous(), group=self.group, async_op=True
                )
            return self._pending([work], received, tag)
        # Do not use gloo's all-gather: if a peer dies during it, gloo frees memory that its other
        # connections are still sending, and the process aborts. An exchange sends as many bytes and
        # needs as much memory, because gloo gathers into its own copy.
        return self._start_exchange(tensor.expand(self.size, *tensor.shape), tag)

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Start to send row i of `tensor` to rank i; return a `Pending` of the rows received.

        Both have shape (size, *S). Row j of the result is from rank j.
        """
        assert tensor.shape[0] == self.size, (
            f"all_to_all needs {self.size} rows, got {tuple(tensor.shape)}"
        )
        if self._is_single_rank():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, all_to_all_bytes(tensor.nbytes, self.size))
        return self._start_exchange(tensor, tag)

    def broadcast(self, tensor: Tensor, tag: str, source: int = 0) -> Pending[Tensor]:
        """Start to overwrite `tensor` with that of rank `source`; return it as a `Pending`.

        `source` is a position in this channel, not a global rank.
        """
        if self._is_single_rank():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, broadcast_bytes(tensor.nbytes, self.size))
        with self.peers.launching(tag):
            work = dist.broadcast(tensor, src=self.ranks[source], group=self.group, async_op=True)
        return self._pending([work], tensor, tag)

    def keep_group(self) -> dist.ProcessGroup:
        """Return the process group, and leave it open when this channel closes.

        Use this for a library that still needs the group after `fit` returns, such as FSDP2.
        """
        assert self.group is not None, "a single rank has no process group"
        self._keeps_group = True
        return self.group

    def guard(self) -> Guard:
        """Return a guard for a block in which another library uses this channel's group.

        It interrupts this channel if a peer leaves.
        """
        me = self.ranks[self.rank]
        return Guard([rank for rank in self.ranks if rank != me], self.interrupt)

    def interrupt(self) -> None:
        """Make this channel's collectives fail, on its peers too; with CUDA, abort all NCCL groups.

        Call this when a peer has left, because collectives might hang. The channel is then
        unusable. With CUDA, the process groups of other channels are unusable too.
        """
        self.interrupted = True
        if self.device.type == "cuda":
            abort_nccl()
        else:
            self._sockets.disconnect()  # the peers' collectives fail as well

    def close(self, failed: bool = False) -> None:
        """End the heartbeat that this channel has started, and destroy its groups.

        Pending results are lost. A group that is kept open (`keep_group`) is not destroyed.
        `failed` is whether an error has ended the fit on this rank. Other ranks may then wait for
        it in a collective on the kept group. They notice that it has left, but without heartbeats,
        the group becomes unusable here.
        """
        if failed and self._keeps_group and self.peers.monitor is None:
            self.interrupt()
        # close the heartbeat first, so that a peer whose connection breaks can read that this rank
        # has left
        self.peers.close(self._owns_monitor)
        if self.peers.ended:  # otherwise, destroying a group would wait for a hung rank
            self._sockets.disconnect()
        backends = []
        for group in (None if self._keeps_group else self.group, self._downward):
            if group is not None:
                backends.append(group._get_backend(self.device))
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        # Garbage collection in a forked worker would wait for the groups' threads, which do not
        # exist there.
        self.group = self._downward = group = None
        # Freeing a backend joins its threads, one of which may need the GIL to free a tensor. In
        # torch 2.6, the group would do that with the GIL held. A reference to the backend itself
        # releases the GIL, so it has to be the last one.
        if not self.peers.ended:
            backends.clear()
            return
        # Gloo sometimes misses that a connection broke just before it sends, and would wait for
        # the whole timeout. So do not wait for its thread; it dies with the process.
        freeing = threading.Thread(target=backends.clear, name="free-groups", daemon=True)
        freeing.start()
        freeing.join(_FREE_S)

    def _is_single_rank(self) -> bool:
        """Return whether this is a single-rank channel; raise a RuntimeError if it is closed."""
        if self.group is None and self.size > 1:
            raise RuntimeError(
                "This channel is closed because the fit that opened it has ended. Open a new one."
            )
        return self.size == 1

    def _start_monitor(self, liveness: bool) -> PeerMonitor | None:
        """Start this rank's heartbeat and return its monitor; collective.

        Return None for a single rank, if `liveness` is False on any rank, or if the job has no
        TCPStore.
        """
        if self._is_single_rank():
            return None
        store = job_store() if liveness else None
        monitor = None if store is None else PeerMonitor(store, self.ranks[self.rank])
        token = torch.tensor([0 if monitor is None else monitor.token], device=self.device)
        tokens = self.all_gather(token, PEERS_TAG).wait().flatten().tolist()
        if monitor is None or 0 in tokens:
            return None
        monitor.start(dict(zip(self.ranks, tokens, strict=True)))
        return monitor

    def _start_exchange(self, rows: Tensor, tag: str) -> Pending[Tensor]:
        """Start to send row i to rank i and receive row j from rank j; rows may share memory."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        with self.peers.launching(tag):
            if self._downward is None:
                works = [_all_to_all(received, rows, self.group)]
            else:
                # A receiver tells the sender that it is ready. On a single socket, rank 1's signal
                # is queued behind all values that it is already sending to rank 0, so a slow link
                # is used in one direction, then in the other (1.9 times as long for 8 MB at 100
                # Mbit/s). One socket per direction avoids this. `up` carries rows to higher ranks,
                # so the rows it delivers are from lower ranks.
                below = [int(rank < self.rank) for rank in range(self.size)]  # rows per rank
                above = [int(rank > self.rank) for rank in range(self.size)]
                lower, higher = slice(None, self.rank), slice(self.rank + 1, None)
                up, down = self.group, self._downward
                works = [
                    _all_to_all(received[lower], rows[higher], up, below, above),
                    _all_to_all(received[higher], rows[lower], down, above, below),
                ]
                received[self.rank].copy_(rows[self.rank])
        return self._pending(works, received, tag)

    def _pending(self, works: Sequence[Any], result: Tensor, tag: str) -> Pending[Tensor]:
        def resolve() -> Tensor:
            if self.device.type == "cuda":
                self._order_stream(works, tag)
            else:
                with self.ledger.count_wait(tag):
                    self.peers.wait(works, tag)
            return result

        return Pending(resolve)

    def _order_stream(self, works: Sequence[Any], tag: str) -> None:
        """Make the current CUDA stream wait for NCCL's stream, and record how long it waits."""
        stream = torch.cuda.current_stream(self.device)
        make: Any = torch.cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        begin.record(stream)
        for work in works:
            work.wait()  # does not block the host, so there is nothing to watch
        end.record(stream)
        self.ledger.count_device_wait(
            tag, lambda: begin.elapsed_time(end) / 1e3 if end.query() else None
        )


def abort_nccl() -> None:
    """Abort all NCCL groups of this process, so that a lost rank does not block it on exit."""
    c10d = dist.distributed_c10d
    groups = [group for group, (backend, _) in c10d._world.pg_map.items() if backend == "nccl"]
    if not groups:
        return
    first: Any = groups[0]._get_backend(torch.device("cuda"))
    first._group_start()  # abort them together: one by one, they would wait for each other
    for group in groups:
        group.abort()
    first._group_end()


def _all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    rows_from: list[int] | None = None,
    rows_to: list[int] | None = None,
) -> Any:
    """Launch an all-to-all of one row per rank, or of the given numbers; return torch's handle."""
    return dist.all_to_all_single(
        received, sent.contiguous(), rows_from, rows_to, group=group, async_op=True
    )


def _high_priority_options(timeout: timedelta | None) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # otherwise, `new_group` warns that it overrides the default
    return options


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Context manager that keeps `new_group` from splitting the default process group.

    Lightning binds the default group to a device. torch then creates a new group by splitting the
    default group, which involves the ranks outside the new group as well. Splitting needs nccl: it
    fails if the default group uses gloo on a CUDA device, regardless of the new group's backend.
    If both groups use nccl, this context manager is not needed.
    """
    default = dist.group.WORLD
    assert default is not None, "the process group is initialized"
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
