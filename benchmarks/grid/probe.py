"""Measure the links of a cell with plain sockets: round trip, loss, and throughput.

`python -m benchmarks.grid.probe echo COUNT` runs in every node: node 0 sends datagrams to node 1,
which returns them. `... exchange BYTES` sends that many bytes from every node to every other at the
same time, on a connection for each pair and direction. Both print JSON.
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import sys
import threading
import time

from benchmarks.grid.cells import PRIORITY
from benchmarks.lab import raise_priority

PORT = 5100
PAUSE_S = 0.002  # between two datagrams
LAST_S = 2.0  # wait for the last ones to return
CHUNK = 1 << 18


def echo(rank: int, count: int) -> dict[str, float]:
    """Return the median round trip in ms, and the share of the datagrams that did not return."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("", PORT))
        if rank > 1:
            return {}
        if rank == 1:
            own.settimeout(LAST_S + 10)  # node 0 starts later, or has ended
            try:
                while True:
                    data, source = own.recvfrom(64)
                    own.sendto(data, source)
                    own.settimeout(LAST_S)
            except TimeoutError:
                return {}
        time.sleep(0.5)  # until node 1 listens
        sent: list[float] = []
        returned: dict[int, float] = {}
        while len(returned) < count:
            due = sent[-1] + PAUSE_S if sent else 0.0
            if len(sent) == count and time.monotonic() > sent[-1] + LAST_S:
                break
            if len(sent) < count and time.monotonic() >= due:
                own.sendto(len(sent).to_bytes(4, "big"), ("node1", PORT))
                sent.append(time.monotonic())
            for _ in select.select([own], [], [], PAUSE_S / 2)[0]:
                returned[int.from_bytes(own.recv(64), "big")] = time.monotonic()
    trips = [1e3 * (at - sent[number]) for number, at in returned.items()]
    return {"median_ms": statistics.median(trips), "lost": 1 - len(returned) / len(sent)}


def exchange(rank: int, size: int, num_bytes: int) -> dict[str, float]:
    """Return the seconds until this node has sent all of its bytes and received all others'."""
    others = [node for node in range(size) if node != rank]

    def receive(peer: socket.socket) -> None:
        buffer = bytearray(CHUNK)
        with peer:
            while peer.recv_into(buffer):
                pass

    def send(peer: socket.socket) -> None:
        left = num_bytes
        data = bytes(CHUNK)
        with peer:
            while left > 0:
                peer.sendall(data[: min(left, CHUNK)])
                left -= CHUNK
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # until the receiver has everything and closes

    with socket.create_server(("", PORT), backlog=size) as server:
        peers = [_connected(f"node{node}") for node in others]
        accepted = [server.accept()[0] for _ in others]
    work = [threading.Thread(target=receive, args=(peer,)) for peer in accepted]
    work += [threading.Thread(target=send, args=(peer,)) for peer in peers]
    start = time.monotonic()
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    return {"seconds": time.monotonic() - start}


def _connected(node: str) -> socket.socket:
    for _ in range(500):
        try:
            return socket.create_connection((node, PORT))
        except ConnectionRefusedError:  # it does not listen yet
            time.sleep(0.02)
    raise RuntimeError(f"{node} does not listen")


def main() -> None:
    """Run one probe on this node."""
    probe, number = sys.argv[1], int(sys.argv[2])
    raise_priority(int(os.environ.get(PRIORITY, "0")))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = echo(rank, number) if probe == "echo" else exchange(rank, size, number)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
