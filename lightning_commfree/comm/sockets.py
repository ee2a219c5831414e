"""Choose the network interface for gloo, and close a rank's sockets in forked processes.

gloo listens on the address to which this host's name resolves. On Debian, that is 127.0.1.1, which
other machines cannot reach. `choose_interface` instead finds the interface with the route to the
main machine. Asking the kernel for the route sends nothing.

Data loader workers are forked from a rank and inherit its open sockets. If the rank is killed, a
busy worker survives it for a while and keeps the rank's connections open, so the other ranks'
collectives wait instead of failing. `CloseOnFork` closes the inherited sockets in children that
`multiprocessing` forks, including data loader workers, but not in children of a plain `os.fork`.
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
_SIOCGIFADDR = {"linux": 0x8915, "darwin": 0xC0206921}  # ioctl for an interface's IPv4 address


class GlooInterface:
    """Selects gloo's network interface through an environment variable, and restores it later."""

    def __init__(self) -> None:
        self._before: str | None = None
        self._changed = False

    def select(self, main_address: str) -> None:
        """Select the interface that reaches `main_address`, unless the user has selected one.

        Raise a ValueError if several interfaces are possible, or none.
        """
        self.restore()
        if os.environ.get(VARIABLE):
            return
        name = choose_interface(main_address)
        if name is not None:
            self._before, self._changed = os.environ.get(VARIABLE), True
            os.environ[VARIABLE] = name

    def restore(self) -> None:
        """Restore the previous value of the environment variable."""
        if self._changed:
            os.environ.pop(VARIABLE, None)
            if self._before is not None:
                os.environ[VARIABLE] = self._before
            self._changed = False


def choose_interface(main_address: str) -> str | None:
    """Return the name of the interface that gloo should use to reach the main machine, or None.

    None means that gloo's default works, because this host's name resolves to an address that other
    machines can reach. `main_address` is the main machine's address or host name, as in
    `MASTER_ADDR`. Raise a ValueError if several interfaces are possible, or none.
    """
    addresses = {name: interface_address(name) for _, name in socket.if_nameindex()}
    mine = _local_address_for(main_address)
    for name, address in addresses.items():
        if address is not None and address == mine and not ip_address(address).is_loopback:
            return name
    # on the main machine itself, the route to `main_address` uses the loopback interface
    if any(not ip_address(address).is_loopback for address in host_addresses()):
        return None
    others = [n for n, a in addresses.items() if a is not None and not ip_address(a).is_loopback]
    if len(others) == 1:
        return others[0]
    raise ValueError(
        f"Cannot determine which network interface to use on host {socket.gethostname()}: neither"
        f" its hostname nor the route to {main_address!r} identifies one. Its interfaces are:"
        f" {', '.join(others) or 'none with an IPv4 address'}. On every host, set {VARIABLE} to the"
        " interface that connects to the others."
    )


def connection_error(error: Exception) -> str:
    """Return the error message for ranks on several machines that cannot connect to each other."""
    return (
        f"The ranks cannot connect to each other ({str(error).strip()}). On this host gloo listens"
        f" on {os.environ.get(VARIABLE) or 'the address of the host name'}, which may be the wrong"
        f" interface or blocked by a firewall. On every host, set {VARIABLE} to the interface that"
        " connects to the others; run `ip address` to list them."
    )


def interface_address(name: str) -> str | None:
    """Return the first IPv4 address of an interface, or None if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR.get(sys.platform, 0), request)
        return socket.inet_ntoa(answer[20:24])  # a sockaddr_in after 16 bytes of name
    return None


def host_addresses() -> list[str]:
    """Return the addresses to which this host's name resolves."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [str(address[0]).partition("%")[0] for *_, address in found]
    return []


def _local_address_for(host: str) -> str | None:
    """Return the IPv4 address of this machine on the route to `host`, or None."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # looks up a route; connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])
    return None


_DESCRIPTORS = "/dev/fd"  # lists this process's descriptors, on Linux and macOS


class CloseOnFork:
    """TCP sockets, registered by `opening`, that children forked by `multiprocessing` close."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}  # by descriptor, to detect reused descriptors

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Context manager that registers all TCP sockets opened during its block, by any thread."""
        before = tcp_sockets()
        try:
            yield
        finally:
            new = {fd: inode for fd, inode in tcp_sockets().items() if before.get(fd) != inode}
            if not self._inodes:
                util.register_after_fork(self, CloseOnFork._close)
            self._inodes |= new

    def disconnect(self) -> None:
        """Shut down the registered sockets in this process, but keep their descriptors open."""
        for descriptor in self._still_open():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo would abort
                    copy.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        """Close the registered sockets in a forked child; they stay open in the parent."""
        for descriptor in self._still_open():
            with suppress(OSError):
                os.close(descriptor)

    def _still_open(self) -> Iterator[int]:
        """Yield the registered descriptors that still refer to the same sockets."""
        for descriptor, inode in self._inodes.items():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    yield descriptor


def tcp_sockets() -> dict[int, int]:
    """Return the inode of each TCP socket of this process, by file descriptor."""
    found = {}
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # closed in the meantime, like the listing's own descriptor
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _is_tcp(int(name)):
                found[int(name)] = status.st_ino
    return found


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6)
