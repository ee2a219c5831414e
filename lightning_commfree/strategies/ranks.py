"""What the ranks of a job tell each other by Lightning's own collectives, in a fit and outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_commfree.comm.network import Network

T = TypeVar("T")


class Ranks:
    """All ranks of a strategy's job.

    Args:
        strategy: of this rank.
        network: names the rank that is gone.
    """

    def __init__(self, strategy: DDPStrategy, network: Network) -> None:
        self._strategy, self._network = strategy, network

    @property
    def rank(self) -> int:
        """This one's."""
        return self._strategy.global_rank

    @property
    def size(self) -> int:
        """How many they are."""
        return self._strategy.world_size

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src`; collective."""
        return self._strategy.broadcast(value, src)

    def all_flags(self, mine: bool) -> list[bool]:
        """Return the flags of all ranks, by rank; collective."""
        flags = torch.zeros(self.size, device=self._strategy.root_device)
        flags[self.rank] = float(mine)
        with self._network.naming_lost("reduce"):
            total = DDPStrategy.reduce(self._strategy, flags, reduce_op="sum")
        return [bool(flag) for flag in total.tolist()]

    @contextmanager
    def failing_as_one(self) -> Iterator[None]:
        """If the body fails on some rank, let all ranks raise: their own error, or that one's."""
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is raised below
            failure = error
        failed = self.all_flags(failure is not None)
        if any(failed):
            text = self.broadcast(str(failure), failed.index(True))
            raise failure or RuntimeError(text)
