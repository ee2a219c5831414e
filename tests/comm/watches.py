"""Peer watches of several ranks in one process, and collectives that end badly or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_commfree.comm.liveness import PeerMonitor, PeerWatch
from tests.world import free_port

LONG = timedelta(seconds=60)  # what is noticed soon must not take this long


@contextmanager
def watches(size: int, timeout: timedelta = LONG) -> Iterator[list[PeerWatch]]:
    """The watches of several ranks, all in this process, on a real store."""
    server = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    monitors = [
        PeerMonitor(dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False), rank)
        for rank in range(size)
    ]
    for monitor in monitors:
        monitor.start({one.rank: one.token for one in monitors})
    seconds = timeout.total_seconds()
    ranks = [PeerWatch(range(size), one.rank, seconds, one) for one in monitors]
    try:
        yield ranks
    finally:
        for watch in reversed(ranks):  # the one with the store last
            watch.close(owner=True)


def fall_silent(watch: PeerWatch) -> None:
    """Let a rank stop beating, as if its process had ended without a word."""
    assert watch.monitor is not None
    watch.monitor._write = lambda: None  # type: ignore[method-assign]


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
