"""Sockets of a rank: the network interface that gloo uses, and close-on-fork.

*Interface.* gloo listens on the address of this host's name, which on Debian is 127.0.1.1 and
cannot be reached from elsewhere. The interface with the route to the main machine is a better
choice. Asking the kernel for that route sends nothing.

*Close-on-fork.*

1. The workers of a data loader are forked off a rank and inherit its open sockets.
2. The rank is killed. A busy worker lives on for a while, and the kernel keeps the rank's
   connections open for it. The other ranks' exchanges do not break, and they wait.

So children of `multiprocessing`, which includes the workers of data loaders, close the sockets that
the rank had opened to other ranks. A child of a bare `os.fork` does not.
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
    """The interface for gloo in this process's environment, from `tell` to `take_back`."""

    def __init__(self) -> None:
        self._before: str | None = None
        self._told = False

    def tell(self, meeting_point: str) -> None:
        """Set the interface, unless the user has set one; see `choose_interface`.

        Raises:
            ValueError: it cannot be chosen without the user.
        """
        self.take_back()
        if os.environ.get(VARIABLE):
            return
        name = choose_interface(meeting_point)
        if name is not None:
            self._before, self._told = os.environ.get(VARIABLE), True
            os.environ[VARIABLE] = name

    def take_back(self) -> None:
        """Restore the environment."""
        if self._told:
            os.environ.pop(VARIABLE, None)
            if self._before is not None:
                os.environ[VARIABLE] = self._before
            self._told = False


def choose_interface(meeting_point: str) -> str | None:
    """Choose the network interface for gloo in a job of several machines.

    Args:
        meeting_point: address or host name of the main machine, as in `MASTER_ADDR`.

    Returns:
        Its name; None to leave the choice to gloo, which then chooses one that others can reach.

    Raises:
        ValueError: it cannot be chosen without the user.
    """
    addresses = {name: interface_address(name) for _, name in socket.if_nameindex()}
    mine = _address_towards(meeting_point)
    for name, address in addresses.items():
        if address is not None and address == mine and not ip_address(address).is_loopback:
            return name
    # On the main machine the route leads to the loopback, and its own name often does too.
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
    """Explain what to do if ranks of several machines do not reach each other."""
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
    """Return the addresses of this host's name."""
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
    """TCP sockets that forked children close; nothing global outlives this object."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}  # by descriptor, which another file may get later

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Register all TCP sockets that are opened in the body, by any thread and any library."""
        before = _tcp_sockets()
        try:
            yield
        finally:
            new = {fd: inode for fd, inode in _tcp_sockets().items() if before.get(fd) != inode}
            if not self._inodes:
                util.register_after_fork(self, Unshared._close)
            self._inodes |= new

    def _close(self) -> None:
        """Close them in a child; the parent keeps its own."""
        for descriptor, inode in self._inodes.items():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)


def _tcp_sockets() -> dict[int, int]:
    """Return the inodes of this process's TCP sockets, by descriptor."""
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
