"""A wide-area network in user space: packets between nodes are delayed, and a few are lost.

The kernels on which the laboratory runs may lack netem. Here the interface of every node is a TUN
device, whose packets one process reads. It loses a packet with a fixed probability, keeps every
other one for half of the round trip, and then writes it to the device of its destination.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lab.nodes import INTERFACE, LaboratoryUnavailable, raise_priority, reaped

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500
_AT_ONCE = 64  # packets read from one node before the others have their turn
_READY = b"ready\n"
_NICE = -15  # a network does not wait for a core


class Wire:
    """The packets that are on their way.

    Args:
        nodes: number of nodes; the address of node i ends with i + 1.
        delay_s: one way.
        loss: probability that a packet is lost, in either direction.
        seed: of the losses.
    """

    def __init__(self, nodes: int, delay_s: float, loss: float, seed: int = 0) -> None:
        self._nodes, self._delay_s, self._loss = nodes, delay_s, loss
        self._random = random.Random(seed).random
        self._waiting: deque[tuple[float, int, bytes]] = deque()  # in order of arrival

    def send(self, packet: bytes, now: float) -> None:
        """Accept an IPv4 packet from a node, or lose it; others are dropped."""
        node = packet[19] - 1 if packet[0] >> 4 == 4 else -1
        if 0 <= node < self._nodes and self._random() >= self._loss:
            self._waiting.append((now + self._delay_s, node, packet))

    def arrived(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yield the packets that have arrived, each with its destination."""
        while self._waiting and self._waiting[0][0] <= now:
            _, node, packet = self._waiting.popleft()
            yield node, packet

    def next_arrival(self) -> float | None:
        """Return when the next packet arrives; None if there is none."""
        return self._waiting[0][0] if self._waiting else None


@contextmanager
def relay(namespaces: Sequence[str], round_trip_s: float, loss: float) -> Iterator[None]:
    """Create the interface of every node, and relay packets between them until the end.

    Raises:
        LaboratoryUnavailable: this machine has no TUN devices.
    """
    words = [sys.executable, __file__, str(round_trip_s / 2), str(loss), *namespaces]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, start_new_session=True
    )
    with reaped(process):
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != _READY:
            error = process.stderr.read().decode(errors="replace").strip().splitlines()
            raise LaboratoryUnavailable(
                f"The laboratory cannot create TUN devices: {error[-1] if error else 'no reason'}."
            )
        yield


def _open_tun(namespace: str) -> int:
    """Create a node's interface; return its file descriptor, which works in every namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Python has `os.setns` from 3.12 on
    with open("/proc/self/ns/net") as home, open(f"/var/run/netns/{namespace}") as node:
        if libc.setns(node.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        try:
            device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(device, _TUNSETIFF, request)
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
    return device


def _serve(devices: Sequence[int], wire: Wire) -> None:
    while True:
        now = time.monotonic()
        for node, packet in wire.arrived(now):
            try:
                os.write(devices[node], packet)
            except OSError:  # the interface is down
                continue
        due = wire.next_arrival()
        wait = None if due is None else max(0.0, due - now)
        for device in select.select(devices, [], [], wait)[0]:
            now = time.monotonic()
            try:
                for _ in range(_AT_ONCE):
                    wire.send(os.read(device, _MTU), now)
            except BlockingIOError:
                continue


def main() -> None:
    """Relay until the process is killed: the delay, the loss, and the nodes' namespaces."""
    delay, loss, *namespaces = sys.argv[1:]
    raise_priority(_NICE)
    devices = [_open_tun(namespace) for namespace in namespaces]
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    _serve(devices, Wire(len(devices), float(delay), float(loss)))


if __name__ == "__main__":
    main()
