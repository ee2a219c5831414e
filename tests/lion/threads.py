"""Many workers without as many processes: channels between threads, for what runs over `Channel`.

The exchange's own code runs on every worker; only the transport is played.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.liveness import PeerWatch

T = TypeVar("T")
PATIENCE_S = 20.0  # a worker that never comes breaks the barrier for all


class Table:
    """Where the workers of one channel meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.messages: list[tuple[Tensor, str]] = [(torch.empty(0), "")] * size


class ThreadChannel:
    """A worker's end; every exchange takes place at once, while all threads stand still.

    `sent` counts the bytes that leave this worker, by tag: block by block, without a formula.
    """

    def __init__(self, table: Table, rank: int, ranks: Sequence[int] | None = None) -> None:
        self._table, self.rank, self.size = table, rank, len(table.messages)
        self.ranks = tuple(range(self.size)) if ranks is None else tuple(ranks)
        self.device = torch.device("cpu")
        self.ledger, self.peers = Ledger(), PeerWatch()
        self.sent: Counter[str] = Counter()

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        received = self._meet(tensor, tag)
        self.sent[tag] += sum(tensor.nbytes for rank in range(self.size) if rank != self.rank)
        return Pending.here(torch.stack(received))

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        assert len(tensor) == self.size
        received = self._meet(tensor, tag)
        others = (row for rank, row in enumerate(tensor) if rank != self.rank)
        self.sent[tag] += sum(row.nbytes for row in others)
        return Pending.here(torch.stack([rows[self.rank] for rows in received]))

    def _meet(self, tensor: Tensor, tag: str) -> list[Tensor]:
        table = self._table
        table.messages[self.rank] = (tensor.clone(), tag)
        table.barrier.wait()
        received, tags = zip(*table.messages, strict=True)
        table.barrier.wait()  # nobody writes the next message before all have read this one
        assert len(set(tags)) == 1, f"workers are out of step: {tags}"
        assert len({tuple(message.shape) for message in received}) == 1, "sizes differ"
        return list(received)


def in_threads(size: int, play: Callable[[Any], T]) -> list[T]:
    """Return `play(channel)` of every worker."""
    table = Table(size)
    return _run([partial(play, ThreadChannel(table, rank)) for rank in range(size)], [table])


def in_nodes(nodes: int, size: int, play: Callable[[Any, Any], T]) -> list[T]:
    """Return `play(channel, node)` of every rank; `size` consecutive ranks are a node.

    The channel joins ranks of one place on all nodes, as in `DistributedLionStrategy`.
    """
    across, within = [Table(nodes) for _ in range(size)], [Table(size) for _ in range(nodes)]
    plays = []
    for rank in range(nodes * size):
        node, place = divmod(rank, size)
        channel = ThreadChannel(across[place], node, range(place, nodes * size, size))
        siblings = range(node * size, (node + 1) * size)
        plays.append(partial(play, channel, ThreadChannel(within[node], place, siblings)))
    return _run(plays, across + within)


def _run(plays: Sequence[Callable[[], T]], tables: Sequence[Table]) -> list[T]:
    def worker(play: Callable[[], T]) -> T:
        try:
            return play()
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            for table in tables:
                table.barrier.abort()
            raise

    with ThreadPoolExecutor(len(plays)) as pool:
        futures = [pool.submit(worker, play) for play in plays]
    errors = [error for future in futures if (error := future.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
