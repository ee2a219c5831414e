"""Asynchronous collectives within a group of ranks, with bytes and wait times counted.

This is the only module of the package that calls collectives of `torch.distributed` (FSDP2 calls
its own). A method starts its collective and returns a `Pending`; call `.wait()` at once for the
blocking form. A channel of one rank has the same interface and sends nothing.

Launch collectives of one channel from one thread and in the same order on all ranks; in this
package that order depends on the training step alone. Results may be waited for in any order. Do
not write to an input before its result has arrived; with one rank they may share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from lightning_commfree.comm.liveness import PeerMonitor, PeerWatch, job_store
from lightning_commfree.comm.sockets import CloseOnFork

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """Result of a transfer in flight; keeps the buffers of the transfer alive."""

    def __init__(self, resolve: Callable[[], T]) -> None:
        self._resolve: Callable[[], T] | None = resolve
        self._result: T

    @classmethod
    def here(cls, result: T) -> Pending[T]:
        """Return a `Pending` whose result is already available."""
        return cls(lambda: result)

    def wait(self) -> T:
        """Block until the result has arrived; a second call returns the same object at once.

        Raises:
            RuntimeError: the transfer failed, for example because a peer died or the channel's
                timeout expired. The message names the lost ranks.
        """
        if self._resolve is not None:
            self._result = self._resolve()
            self._resolve = None  # frees the transfer's buffers
        return self._result

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """Return a `Pending` of `function(result)`; it runs once, in the thread that waits."""
        return Pending(lambda: function(self.wait()))


class Channel:
    """One rank's access to the collectives of a group of ranks.

    Args:
        ranks: global ranks of the group; results are in ascending order of rank.
        rank: global rank of this process; the attribute `rank` is its position among `ranks`.
        ledger: counts bytes and waits.
        group: the process group; None for a channel of one rank.
        device: device of inputs and results.
        downward: a second process group of the same ranks. All-gathers and all-to-alls then use it
            for rows sent to lower ranks, and `group` for rows sent to higher ones.
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
        self._group, self._downward = group, downward
        self._watch = PeerWatch(self.ranks, rank)  # `open` replaces it by one that names lost ranks
        self._owns_monitor = self._keeps_group = False
        self._sockets = CloseOnFork()
        assert (group is None) == (self.size == 1), "several ranks need a process group"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, for libraries that communicate on it; None for a single rank."""
        return self._group

    @property
    def peers(self) -> PeerWatch:
        """Monitor of the other ranks, through which a rank can also publish a short status."""
        return self._watch

    @classmethod
    def open(
        cls,
        groups: Sequence[Sequence[int]],
        rank: int,
        ledger: Ledger,
        backend: str = "gloo",
        timeout: timedelta | None = None,
        device: torch.device | None = None,
        wider: Channel | None = None,
        full_duplex: bool = False,
        liveness: bool = True,
    ) -> Channel:
        """Create the process groups and return this rank's channel.

        Collective over the world: every rank must call it with the same `groups`, which together
        contain each rank once. gloo needs CPU tensors, nccl tensors on `device`.

        The first channel also starts this rank's heartbeat (`comm.liveness`), unless some rank
        passes `liveness=False`. Pass that channel as `wider` to later ones, whose ranks it must
        contain: they share its heartbeat. If rank 1 then leaves this channel because rank 2 of
        another one died, errors name rank 2.

        `full_duplex` creates a second gloo group, for large transfers over a slow link:

        1. Rank 0 is ready to receive and tells rank 1, which begins to send.
        2. Rank 1 becomes ready to receive, but its message is queued in the same socket behind all
           the values that it sends. Rank 0 waits for it: the link is idle in one direction, then in
           the other.

        With a group, and so a socket, for each direction, the message is not queued behind the
        values. `python -m benchmarks.duplex` measures the difference.
        """
        mine = None
        sockets = CloseOnFork()
        with sockets.opening():
            for ranks in groups:
                group = downward = None
                if len(ranks) > 1:
                    make = partial(dist.new_group, list(ranks), timeout=timeout, backend=backend)
                    with nullcontext() if backend == "nccl" else _without_bound_device():
                        group = make()
                        downward = make() if full_duplex and backend == "gloo" else None
                if rank in ranks:
                    where = None if backend == "gloo" else device
                    mine = cls(ranks, rank, ledger, group, where, downward)
            assert mine is not None, f"rank {rank} is in none of the groups {groups}"
            patience = timeout or dist.constants.default_pg_timeout
            if wider is None:
                monitor = mine._start_monitor(liveness)
                mine._owns_monitor = True
            else:
                monitor = wider._watch.monitor
            # in groups of one rank too: all ranks must count the same channels of a monitor
            mine._watch = PeerWatch(mine.ranks, rank, patience.total_seconds(), monitor)
        mine._sockets = sockets
        return mine

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Sum `tensor` (any shape, the same on all ranks) over the ranks, in place."""
        if self._is_alone():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, ring_all_reduce_bytes(tensor.nbytes, self.size))
        with self._watch.launching(tag):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return self._pending([work], tensor, tag)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Gather every rank's `tensor` (shape S, the same on all ranks) into shape (size, *S)."""
        if self._is_alone():
            return Pending(lambda: tensor.unsqueeze(0))
        self.ledger.count_sent(tag, all_gather_bytes(tensor.nbytes, self.size))
        # Not `dist.all_gather`: when a peer dies in the middle of it, gloo frees memory that its
        # other connections still send from, and the process aborts. This sends as many bytes and
        # takes as much memory: gloo would gather into a copy of its own.
        return self._exchange(tensor.expand(self.size, *tensor.shape), tag)

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Send row i of `tensor`, shape (size, *S), to rank i; row j of the result is rank j's."""
        assert tensor.shape[0] == self.size, (
            f"all_to_all needs {self.size} rows, got {tuple(tensor.shape)}"
        )
        if self._is_alone():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, all_to_all_bytes(tensor.nbytes, self.size))
        return self._exchange(tensor, tag)

    def broadcast(self, tensor: Tensor, tag: str, source: int = 0) -> Pending[Tensor]:
        """Overwrite `tensor` with the one of `source`, a rank of this channel."""
        if self._is_alone():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, broadcast_bytes(tensor.nbytes, self.size))
        with self._watch.launching(tag):
            work = dist.broadcast(tensor, src=self.ranks[source], group=self._group, async_op=True)
        return self._pending([work], tensor, tag)

    def naming_lost(self, tag: str, computing: bool = False) -> AbstractContextManager[None]:
        """Name the lost ranks if a collective in a `with` block fails.

        For collectives that other libraries run among these ranks, such as a framework's barrier.

        Args:
            tag: name of the collective in the error.
            computing: whether the block may fail for other reasons, as a training step can: its
                error then passes unchanged if no rank is lost.
        """
        return self._watch.naming(tag, computing)

    def keep_group(self) -> dist.ProcessGroup:
        """Return the process group, for a library that needs it longer: `close` leaves it open."""
        assert self._group is not None, "a single rank has no process group"
        self._keeps_group = True
        return self._group

    def close(self) -> None:
        """Destroy the process groups; results that are still pending are lost."""
        # first: a peer whose connection breaks can then read that this rank left on purpose
        self._watch.close(self._owns_monitor)
        for group in (None if self._keeps_group else self._group, self._downward):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        # If a forked worker's garbage collector destroyed them, it would wait for threads that do
        # not exist there.
        self._group = self._downward = None

    def _is_alone(self) -> bool:
        if self._group is None and self.size > 1:
            raise RuntimeError(
                "This channel is closed because the fit that opened it has ended. Open a new one."
            )
        return self.size == 1

    def _start_monitor(self, liveness: bool) -> PeerMonitor | None:
        """Start this rank's heartbeat; return None for a single rank, or if any rank has none."""
        if self._is_alone():
            return None
        store = job_store() if liveness else None
        monitor = None if store is None else PeerMonitor(store, self.ranks[self.rank])
        token = torch.tensor([0 if monitor is None else monitor.token], device=self.device)
        tokens = self.all_gather(token, PEERS_TAG).wait().flatten().tolist()
        if monitor is None or 0 in tokens:
            return None
        monitor.start(dict(zip(self.ranks, tokens, strict=True)))
        return monitor

    def _exchange(self, rows: Tensor, tag: str) -> Pending[Tensor]:
        """Send row i to rank i and receive row j from rank j; rows may share memory."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        place = self.rank
        with self._watch.launching(tag):
            if self._downward is None:
                works = [_all_to_all(received, rows, self._group)]
            else:
                # `up` carries rows to higher ranks, so the rows it brings are from lower ones
                below = [int(rank < place) for rank in range(self.size)]  # number of rows per rank
                above = [int(rank > place) for rank in range(self.size)]
                lower, higher = slice(None, place), slice(place + 1, None)
                up, down = self._group, self._downward
                works = [
                    _all_to_all(received[lower], rows[higher], up, below, above),
                    _all_to_all(received[higher], rows[lower], down, above, below),
                ]
                received[place].copy_(rows[place])
        return self._pending(works, received, tag)

    def _pending(self, works: Sequence[Any], result: Tensor, tag: str) -> Pending[Tensor]:
        def resolve() -> Tensor:
            with self.ledger.count_wait(tag):
                # nccl's `wait` orders streams without blocking, so there is nothing to watch
                watch = self._watch if self.device.type == "cpu" else PeerWatch()
                watch.wait(works, tag)
            return result

        return Pending(resolve)


def _all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    rows_from: list[int] | None = None,
    rows_to: list[int] | None = None,
) -> Any:
    """Launch an all-to-all with one row per rank, or with the given numbers of rows."""
    return dist.all_to_all_single(
        received, sent.contiguous(), rows_from, rows_to, group=group, async_op=True
    )


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Keep `new_group` from splitting a CUDA communicator when it creates gloo groups.

    1. Lightning binds the default group to a device, so torch connects it at once.
    2. Ranks outside of a new group then take part in a split of the default group, which only nccl
       supports: with a default group of gloo on a CUDA device they fail.
    """
    everybody = dist.group.WORLD
    assert everybody is not None, "the process group is initialized"
    bound, everybody.bound_device_id = everybody.bound_device_id, None
    try:
        yield
    finally:
        everybody.bound_device_id = bound
