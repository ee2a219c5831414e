"""Three replicas on three machines: what they send between exchanges, and what an outage does.

One job answers both.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch

from benchmarks.lab import interface_counters, why_unavailable
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.elastic.lighthouse import HEARTBEAT_SECONDS
from lightning_commfree.elastic.membership import ElasticMembership, Limits
from lightning_commfree.elastic.state_server import StateServer
from tests.forks import ForkedLab

HEARTBEAT_TIMEOUT_S = 3.0
QUIET_S = 5.0
CUT_S = 6.0


def cut() -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    time.sleep(CUT_S)
    subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    print("healed", time.monotonic())


def job(node: int) -> None:
    """Play a replica.

    Node 0 also has the lighthouse. Node 1 counts what its interface sends and receives between two
    exchanges, for which the others wait. Node 2 takes its own link down, as its fifth exchange
    begins.
    """
    # imports torchft, whose threads a process that forks must not have
    from lightning_commfree.elastic.lighthouse import LighthouseRendezvous, serve_lighthouse

    host, url = f"10.77.0.{node + 1}", "http://10.77.0.1:29510"
    if node == 0:
        server = serve_lighthouse("10.77.0.1", 29510, 1, 60.0, HEARTBEAT_TIMEOUT_S)
        assert server is not None
    transfer = StateServer(host)
    transfer.serve(dict, lambda first: [])
    membership = ElasticMembership(
        LighthouseRendezvous(url),
        transfer,
        f"replica{node}",
        Ledger(),
        host,
        limits=Limits(2, 3),
        timeout=timedelta(seconds=60),
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
    )
    membership.limits = Limits(3, 3)  # found the job together
    membership.start({})
    membership.limits = Limits(2, 3)

    view = membership.agree(0, 0)
    view.channel.all_gather(torch.tensor([node]), "test").wait()
    if node == 1:
        time.sleep(0.5)  # for the last acknowledgments
        before, start_s = interface_counters(), time.monotonic()
        time.sleep(QUIET_S)
        after, seconds = interface_counters(), time.monotonic() - start_s
        print("sent", (after.sent_bytes - before.sent_bytes) / seconds)
        print("received", (after.received_bytes - before.received_bytes) / seconds)
    view = membership.agree(1, 1)
    view.channel.all_gather(torch.tensor([node]), "test").wait()

    flight, longest_s, last_s, end_s = 2, 0.0, time.monotonic(), time.monotonic() + 14.0
    may_end = False
    try:
        while not may_end:
            view = membership.agree(flight, flight)
            if flight == 5 and node == 2:
                threading.Thread(target=cut).start()
                time.sleep(0.5)
            try:
                # agree on the end: a member that exchanges once more would wait for the others
                is_late = torch.tensor([time.monotonic() > end_s])
                may_end = bool(view.channel.all_gather(is_late, "test").wait().any())
            except RuntimeError as error:
                print("failed", error)
                membership.failed()
                continue
            flight += 1
            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
            time.sleep(0.2)
        print("members", *view.members, "flights", flight, "longest", longest_s)
    except RuntimeError as error:
        print("ended", time.monotonic(), error)
    os._exit(0)


pytestmark = [
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
    pytest.mark.skipif(
        find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
    ),
]


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    with ForkedLab(3, rate=None) as lab:
        results = lab.run([[job, node] for node in range(3)], timeout_s=150)
    return [result.output for result in results]


def word_after(name: str, output: str) -> str:
    words = output.split()
    assert name in words, output
    return words[words.index(name) + 1]


def test_a_heartbeat_costs_less_than_half_a_kilobyte_each_way(outputs: list[str]) -> None:
    """Counted at the interface of a member, with all headers; nothing else is sent meanwhile.

    A window may hold one heartbeat more than its length: both of its ends may fall on one.
    """
    heartbeats = QUIET_S / HEARTBEAT_SECONDS + 1
    for direction in ("sent", "received"):
        counted = QUIET_S * float(word_after(direction, outputs[1]))
        assert 100 * (heartbeats - 2) < counted < 500 * heartbeats


def test_a_replica_that_is_cut_off_is_left_behind_and_told(outputs: list[str]) -> None:
    for output in outputs[:2]:
        assert "members 0 1 flights" in output, output
        assert int(word_after("flights", output)) > 20, output
        assert float(word_after("longest", output)) < HEARTBEAT_TIMEOUT_S + 3.0, output
    told_s = float(word_after("ended", outputs[2])) - float(word_after("healed", outputs[2]))
    assert 0.0 < told_s < 10.0, outputs[2]
    assert "continued without this one" in outputs[2], outputs[2]
