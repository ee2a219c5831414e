"""By which network interface do the ranks of several machines reach each other?

gloo listens where this host's name points to, which on Debian is 127.0.1.1: reachable from nowhere
else. The way to the address at which all ranks meet is a better guess. Asking the kernel for it
sends nothing.

Sockets that forked children do not keep.

1. A data loader's workers are forked off a rank and hold all that it had open.
2. The rank is killed. A worker that is busy goes on for a while, and the kernel keeps the rank's
   connections up for it: to the others the rank looks alive, and they wait for their whole timeout.

Children of `multiprocessing` (data loaders' workers are some) therefore close what the rank opened
to other ranks. A child of a bare `os.fork` does not.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from multiprocessing import util

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = {"linux": 0x8915, "darwin": 0xC0206921}  # asks the kernel for an interface's IPv4


class GlooInterface:
    """What gloo is told in this process's environment, from `tell` to `take_back`."""

    def __init__(self) -> None:
        self._before: str | None = None
        self._told = False

    def tell(self, meeting_point: str) -> None:
        """Name the interface, unless the user has; see `choose_interface`.

        Raises:
            ValueError: none is the obvious one.
        """
        self.take_back()
        if os.environ.get(VARIABLE):
            return
        name = choose_interface(meeting_point)
        if name is not None:
            self._before, self._told = os.environ.get(VARIABLE), True
            os.environ[VARIABLE] = name

    def take_back(self) -> None:
        """Leave the environment as it was."""
        if self._told:
            os.environ.pop(VARIABLE, None)
            if self._before is not None:
                os.environ[VARIABLE] = self._before
            self._told = False


def choose_interface(meeting_point: str) -> str | None:
    """Return the interface that gloo is to use in a job of several machines.

    Args:
        meeting_point: address or host name of the main node, as in `MASTER_ADDR`.

    Returns:
        Its name; None to leave the choice to gloo, whose own is one that others can reach.

    Raises:
        ValueError: none is the obvious one.
    """
    addresses = {name: interface_address(name) for _, name in socket.if_nameindex()}
    mine = _address_towards(meeting_point)
    for name, address in addresses.items():
        if address is not None and address == mine and not ip_address(address).is_loopback:
            return name
    # on the main node its own name may be one for the loopback
    if any(not ip_address(address).is_loopback for address in host_addresses()):
        return None
    others = [n for n, a in addresses.items() if a is not None and not ip_address(a).is_loopback]
    if len(others) == 1:
        return others[0]
    raise ValueError(
        f"By which network interface does this host ({socket.gethostname()}) reach the other ones?"
        f" Its name and {meeting_point!r} point back to itself, and it has"
        f" {', '.join(others) or 'no interface with an address'}. Set {VARIABLE} to one of them,"
        " on every host to its own."
    )


def unreachable(error: Exception) -> str:
    """Say what to do about ranks of several machines that do not reach each other."""
    return (
        f"The ranks do not reach each other ({str(error).strip()}). gloo listens on"
        f" {os.environ.get(VARIABLE) or 'the address of the host name'} here; a firewall may be in"
        f" the way, or it is the wrong one. Set {VARIABLE} on every host to the interface that"
        " leads to the others, as `ip address` lists them."
    )


def interface_address(name: str) -> str | None:
    """Return the (first) IPv4 address of an interface; None where it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR.get(sys.platform, 0), request)
        return socket.inet_ntoa(answer[20:24])  # a sockaddr_in behind 16 bytes of name
    return None


def host_addresses() -> list[str]:
    """Return the addresses that this host's name stands for."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [str(address[0]).partition("%")[0] for *_, address in found]
    return []


def _address_towards(host: str) -> str | None:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))  # looks for a route; a datagram socket sends nothing here
        return str(asking.getsockname()[0])
    return None


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
