"""Sockets that forked children do not keep.

1. A data loader's workers are forked off a rank and hold all that it had open.
2. The rank is killed. A worker that is busy goes on for a while, and the kernel keeps the rank's
   connections up for it: to the others the rank looks alive, and they wait for their whole timeout.

Children of `multiprocessing` (data loaders' workers are some) therefore close what the rank opened
to other ranks. A child of a bare `os.fork` does not.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util

_DESCRIPTORS = "/dev/fd"  # of this process, on Linux and macOS


class Unshared:
    """TCP sockets that belong to this process alone.

    The children forget about them with this object: nothing global outlives it.
    """

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}  # by descriptor, which another file may get later

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Take for this process alone what is opened in the body, by any thread and any library."""
        before = _tcp_sockets()
        try:
            yield
        finally:
            new = {fd: inode for fd, inode in _tcp_sockets().items() if before.get(fd) != inode}
            if not self._inodes:
                util.register_after_fork(self, Unshared._close)
            self._inodes |= new

    def _close(self) -> None:
        """Close them in a child; the process that was forked keeps its own."""
        for descriptor, inode in self._inodes.items():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)


def _tcp_sockets() -> dict[int, int]:
    """Return the inodes of this process's TCP sockets by descriptor."""
    found = {}
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # closed since; the descriptor of this directory itself is
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _is_tcp(int(name)):
                found[int(name)] = status.st_ino
    return found


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.type == socket.SOCK_STREAM and copy.family in (
            socket.AF_INET,
            socket.AF_INET6,
        )
