"""The ports of an elastic job: each listens on one address, and garbage on it changes nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.elastic.lighthouse import LighthouseRendezvous, serve_lighthouse
from lightning_commfree.elastic.membership import ElasticMembership, Limits
from lightning_commfree.elastic.state_server import StateServer
from tests.world import free_port

pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)

HEARTBEAT_TIMEOUT_S = 3.0


def listening() -> dict[int, str]:
    """Return the TCP ports on which this process listens, with the address of each."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:  # the listing's own
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found[int(port, 16)] = readable(address)
    return found


def readable(address: str) -> str:
    if len(address) == 8:
        return socket.inet_ntoa(struct.pack("<I", int(address, 16)))
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def member(name: str, url: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    transfer = StateServer()
    transfer.serve(dict, lambda first: [])
    membership = ElasticMembership(
        LighthouseRendezvous(url),
        transfer,
        name,
        Ledger(),
        limits=Limits(2, 8),
        timeout=timedelta(seconds=60),
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
    )
    assert membership.start({})
    flight = 0
    while True:
        command = pipe.recv()
        if command == "broken":
            membership.failed()
            continue
        view = membership.agree(flight, flight)
        if command == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        started_s = time.monotonic()
        try:
            rows = view.channel.all_gather(torch.full((1000,), ord(name)), "test").wait()
            flight += 1
            pipe.send((chr(rows[0, 0]) + chr(rows[1, 0]), listening()))
        except RuntimeError as error:
            pipe.send((f"{error}", time.monotonic() - started_s))


def serve(port: int) -> None:
    server = serve_lighthouse("127.0.0.1", port, 1, 60.0, HEARTBEAT_TIMEOUT_S)
    time.sleep(300.0)
    server.shutdown()


class Job:
    """A lighthouse, and members in processes of their own that exchange when they are told to."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for name in "ab":
            mine, theirs = context.Pipe()
            process = context.Process(target=member, args=(name, self.url, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        # in a process of its own: ranks that later tests fork must not inherit threads of Rust
        self.server = context.Process(target=serve, args=(self.port,), daemon=True)
        self.server.start()

    def exchange(self) -> list[Any]:
        for pipe in self.pipes:
            pipe.send("exchange")
        assert all(pipe.poll(30.0) for pipe in self.pipes), "an exchange hangs"
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for process in (*self.processes, self.server):
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    found = Job()
    yield found
    found.close()


def test_nothing_listens_on_every_interface(job: Job) -> None:
    for rows, ports in job.exchange():
        assert rows == "ab"
        # store, two groups of gloo, state server, heartbeat
        assert len(ports) >= 5
        assert all(address.startswith("127.") for address in ports.values()), ports


GARBAGE = [
    b"",
    b"\x00\xff" * 40,
    b"\x01\x00\x00\x00\x00\x00\x00\x00",  # as gloo's own greeting begins, with a number
    b"GET / HTTP/1.0\r\n\r\n",
    struct.pack("<BQ", 0, 2**40),  # a key of a terabyte for the store
]


def test_garbage_on_every_port_changes_nothing(job: Job) -> None:
    """10,000 connections over all ports of a member; then exchanges in the old view and a new."""
    _, ports = job.exchange()[0]
    held: list[socket.socket] = []
    for number in range(10_000):
        port = sorted(ports)[number % len(ports)]
        connection = socket.create_connection((ports[port], port), timeout=10.0)
        connection.sendall(GARBAGE[number % len(GARBAGE)])
        held.append(connection)
        if len(held) > 200:
            held.pop(0).close()
    assert [rows for rows, _ in job.exchange()] == ["ab", "ab"]
    for pipe in job.pipes:
        pipe.send("broken")
    found = job.exchange()
    assert [rows for rows, _ in found] == ["ab", "ab"]
    assert set(found[0][1]) != set(ports), "a new view has new groups"
    for connection in held:
        connection.close()


def test_a_member_that_hangs_breaks_the_exchange_in_time(job: Job) -> None:
    """It is stopped between agreeing and sending. gloo would wait for a minute."""
    job.exchange()
    job.pipes[0].send("exchange")
    job.pipes[1].send("stop")
    try:
        assert job.pipes[0].poll(20.0), "the exchange hangs"
        error, seconds = job.pipes[0].recv()
    finally:
        os.kill(job.processes[1].pid, signal.SIGCONT)
    assert "'test' was abandoned because these replicas stopped sending heartbeats: b (" in error
    assert HEARTBEAT_TIMEOUT_S - 1.5 < seconds < HEARTBEAT_TIMEOUT_S + 4.0
