"""Peer watches of several ranks in one process, and collectives that end badly or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

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


def listening() -> int:
    """Return how many TCP sockets of this process listen."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(fields[3] == "0A" and fields[9] in inodes for fields in lines)


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
