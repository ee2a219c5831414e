"""Peer watches of several ranks in one process, and collectives that end badly or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from lightning_commfree.comm.liveness import PeerWatch

LONG = timedelta(seconds=60)  # what is noticed at once must not take this long


@contextmanager
def watches(size: int, timeout: timedelta = LONG) -> Iterator[list[PeerWatch]]:
    """The watches of several ranks, all in this process."""
    ranks = [PeerWatch(rank, timeout) for rank in range(size)]
    for watch in ranks:
        watch.meet({rank: other.address for rank, other in enumerate(ranks)})
    try:
        yield ranks
    finally:
        for watch in ranks:
            watch.close()


class Broken:
    """A collective that has failed."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Connection closed by peer")


class Endless:
    """A collective that does not end."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


class FailsLater(Endless):
    """A collective that fails after some seconds, as soon as something has happened."""

    def __init__(self, after_s: float, happens: Callable[[], None]) -> None:
        self._end, self._happens = time.monotonic() + after_s, happens

    def is_completed(self) -> bool:
        return time.monotonic() > self._end

    def wait(self, timeout: timedelta) -> None:
        if self.is_completed():
            self._happens()
            raise RuntimeError("Connection closed by peer")
        super().wait(timeout)
