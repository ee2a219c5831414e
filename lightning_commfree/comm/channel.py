"""A group of ranks and what is in flight between them.

The only module of the package that calls collectives of `torch.distributed`; FSDP has its own. Each
starts when its method is called and returns a `Pending`; `.wait()` at once is the blocking form. A
channel of one rank takes the same path and sends nothing. Bytes and waits go to the `Ledger`.

Collectives of one channel must be launched in the same order on all of its ranks, from one thread;
that order is a function of the training step alone. Pendings may be waited for in any order. What
goes in must not be written to before the result is here; with one rank the result may be the same
memory.
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
from lightning_commfree.comm.liveness import ADDRESS_BYTES, PeerWatch, Unwatched
from lightning_commfree.comm.liveness import TAG as PEERS_TAG
from lightning_commfree.comm.sockets import Unshared

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A result that is still on its way. It keeps every buffer alive that the transfer touches."""

    def __init__(self, resolve: Callable[[], T]) -> None:
        self._resolve: Callable[[], T] | None = resolve
        self._result: T

    @classmethod
    def here(cls, result: T) -> Pending[T]:
        """Return a `Pending` whose result has arrived already."""
        return cls(lambda: result)

    def wait(self) -> T:
        """Block until the result is here; a second call returns the same object at once.

        Raises:
            RuntimeError: the transfer failed, for example because a peer died or the channel's
                timeout ran out. The message names the ranks that are gone.
        """
        if self._resolve is not None:
            self._result = self._resolve()
            self._resolve = None  # frees the buffers that only the transfer needed
        return self._result

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """Return a `Pending` for `function(result)`; it runs once, in the thread that waits."""
        return Pending(lambda: function(self.wait()))


class Channel:
    """One rank's end of a group of ranks.

    Args:
        ranks: global ranks of the group; results are laid out in ascending order.
        rank: global rank of this process; the attribute `rank` is its place among `ranks`.
        ledger: where bytes and waits are counted.
        group: the process group; None for a channel of one rank.
        device: where tensors must be that go in, and are that come out.
        downward: a second group of the same ranks. Gathers and exchanges then take it for what goes
            to lower ranks, and `group` for what goes to higher ones.
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
        self.ranks = tuple(sorted(ranks))  # as `new_group` orders them, however they are written
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.ledger = ledger
        self.device = device or torch.device("cpu")
        self._group, self._downward = group, downward
        self._watch = Unwatched(self.size)  # from `open` on one that asks
        self._sockets = Unshared()  # what forked children close
        assert (group is None) == (self.size == 1), "several ranks need a process group"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, for libraries that communicate on it; None for a single rank."""
        return self._group

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
        """Make the process groups and return this rank's channel.

        Collective over the world: every rank must call it with the same `groups`, which together
        name each rank once. gloo wants CPU tensors, nccl tensors on `device`.

        A channel of several ranks also listens on a TCP port, by which its ranks find out who is
        gone when an exchange fails; 64 bytes a rank travel here to agree on it. `comm.liveness`
        says what an outsider can do to that port, and what is lost without it: with `liveness`
        False on some ranks, for all. The ranks may be some of an open channel's, `wider`: they find
        out then whose loss made a rank of their own leave.

        `full_duplex` gives gloo a second group, for large gathers and exchanges over a slow link:

        1. Rank 0 is ready to receive and says so. Rank 1 comes a moment later and begins to send.
        2. Rank 1 is ready to receive too, but its word stands in the same socket, behind all that
           it sends. Rank 0 waits for it: one direction of the link is idle, then the other.

        With a group, and so a socket, for each direction, the words overtake the values.
        `python -m benchmarks.duplex` measures the difference.
        """
        mine = None
        sockets = Unshared()
        with sockets.opening():
            for ranks in groups:
                group = downward = None
                if len(ranks) > 1:
                    make = partial(dist.new_group, list(ranks), timeout=timeout, backend=backend)
                    with nullcontext() if backend == "nccl" else _nothing_to_split():
                        group = make()
                        downward = make() if full_duplex and backend == "gloo" else None
                if rank in ranks:
                    where = None if backend == "gloo" else device
                    mine = cls(ranks, rank, ledger, group, where, downward)
            assert mine is not None, f"rank {rank} stands in none of the groups {groups}"
            above = None if wider is None else wider._watch
            mine._meet(timeout or dist.constants.default_pg_timeout, above, liveness)
        mine._sockets = sockets
        return mine

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Sum `tensor` (any shape, same on all ranks) over the ranks, in place."""
        if self._is_alone():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, ring_all_reduce_bytes(tensor.nbytes, self.size))
        with self._watch.launching(tag):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return self._pending([work], tensor, tag)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Collect every rank's `tensor` (shape S, same on all ranks) as one of shape (size, *S)."""
        if self._is_alone():
            return Pending(lambda: tensor.unsqueeze(0))
        self.ledger.count_sent(tag, all_gather_bytes(tensor.nbytes, self.size))
        # Not `dist.all_gather`: when a peer dies in the middle of it, gloo's version frees the
        # memory that its other connections still send from, and the process aborts. The bytes are
        # the same, and so is the memory: gloo gathers into a copy of its own.
        return self._exchange(tensor.expand(self.size, *tensor.shape), tag)

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Send row i of `tensor`, shape (size, *S), to rank i; row j of the result is rank j's."""
        assert tensor.shape[0] == self.size, (
            f"all_to_all wants {self.size} rows, got {tuple(tensor.shape)}"
        )
        if self._is_alone():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, all_to_all_bytes(tensor.nbytes, self.size))
        return self._exchange(tensor, tag)

    def broadcast(self, tensor: Tensor, tag: str, source: int = 0) -> Pending[Tensor]:
        """Overwrite `tensor` with that of the channel's rank `source`."""
        if self._is_alone():
            return Pending(lambda: tensor)
        self.ledger.count_sent(tag, broadcast_bytes(tensor.nbytes, self.size))
        with self._watch.launching(tag):
            work = dist.broadcast(tensor, src=self.ranks[source], group=self._group, async_op=True)
        return self._pending([work], tensor, tag)

    def naming_lost(self, tag: str, computing: bool = False) -> AbstractContextManager[None]:
        """Return a context whose `RuntimeError` names the ranks of this channel that are gone.

        For collectives that others run among the same ranks, as a framework's barrier.

        Args:
            tag: what the error calls them.
            computing: the body does more than that, as a whole training step: an error passes as it
                is where nobody is lost.
        """
        return self._watch.naming(tag, computing)

    def close(self) -> None:
        """Give the process group back, after every `Pending` or in place of its result."""
        # first, so that a peer whose connection breaks now finds that this rank has left
        self._watch.close()
        for group in (self._group, self._downward):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        # a collector that ends it later, in a worker forked off, would wait for threads for ever
        self._group = self._downward = None

    def _is_alone(self) -> bool:
        if self._group is None and self.size > 1:
            raise RuntimeError("This channel is closed: the fit that had opened it is over.")
        return self.size == 1

    def _meet(self, timeout: timedelta, wider: Unwatched | None, liveness: bool) -> None:
        """Let the ranks learn where each of them answers; zeros say nowhere."""
        if self._is_alone():
            return
        watch = PeerWatch(self.ranks[self.rank], timeout, wider) if liveness else None
        mine = bytes(ADDRESS_BYTES) if watch is None else watch.address
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        addresses = self.all_gather(row, PEERS_TAG).wait().cpu()
        if watch is not None:
            found = zip(self.ranks, addresses, strict=True)
            watch.meet({rank: bytes(row.tolist()) for rank, row in found})
            self._watch = watch

    def _exchange(self, rows: Tensor, tag: str) -> Pending[Tensor]:
        """Send row i, which may be the same memory as others, to rank i; row j is rank j's."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        place = self.rank
        with self._watch.launching(tag):
            if self._downward is None:
                works = [_all_to_all(received, rows, self._group)]
            else:
                below = [int(rank < place) for rank in range(self.size)]  # rows that travel
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
                # nccl's `wait` orders streams and does not block: there is nothing to watch
                watch = self._watch if self.device.type == "cpu" else Unwatched(self.size)
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
    """Launch an exchange of a row, or of so many rows, from and to each rank of the group."""
    return dist.all_to_all_single(
        received, sent.contiguous(), rows_from, rows_to, group=group, async_op=True
    )


@contextmanager
def _nothing_to_split() -> Iterator[None]:
    """Let `new_group` make groups of sockets, and not try to split a CUDA communicator for them.

    1. Lightning binds the default group to a device, on which torch opens it at once.
    2. Ranks that are not in a new group then take part in a split of it, which only nccl can do:
       with a default group of gloo on a CUDA device they fail.
    """
    everybody = dist.group.WORLD
    assert everybody is not None, "the process group is initialized"
    bound, everybody.bound_device_id = everybody.bound_device_id, None
    try:
        yield
    finally:
        everybody.bound_device_id = bound
