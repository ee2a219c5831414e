"""Many workers without as many processes: channels between threads, for what runs over `Channel`.

The exchange's own code runs on every worker; only the transport is played.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.ledger import Ledger

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

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, len(table.messages)
        self.ranks = tuple(range(self.size))
        self.device = torch.device("cpu")
        self.ledger = Ledger()
        self.sent: Counter[str] = Counter()

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        received = self._meet(tensor, tag)
        self.sent[tag] += sum(tensor.nbytes for rank in self.ranks if rank != self.rank)
        return Pending.here(torch.stack(received))

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        assert len(tensor) == self.size
        received = self._meet(tensor, tag)
        self.sent[tag] += sum(tensor[rank].nbytes for rank in self.ranks if rank != self.rank)
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

    def worker(rank: int) -> T:
        try:
            return play(ThreadChannel(table, rank))
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(worker, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
