"""A replica is cut off from the network for a while: the others continue, and it finds out."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.lab import NetLab, why_unavailable

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_TIMEOUT_S = 3.0
CUT_S = 10.0

# argv: the node. Node 0 also has the lighthouse; node 2 takes its own link down, as its fifth
# exchange begins.
JOB = f"""
import os, subprocess, sys, threading, time
from datetime import timedelta
import torch
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.lighthouse import LighthouseRendezvous, serve_lighthouse
from lightning_commfree.comm.membership import ElasticMembership, Limits
from lightning_commfree.comm.state_server import StateServer

node = int(sys.argv[1])
host, url = f"10.77.0.{{node + 1}}", "http://10.77.0.1:29510"
if node == 0:
    server = serve_lighthouse("10.77.0.1", 29510, 1, 60.0, {HEARTBEAT_TIMEOUT_S})
transfer = StateServer(host)
transfer.serve(dict, lambda first: [])
membership = ElasticMembership(
    LighthouseRendezvous(url), transfer, f"replica{{node}}", Ledger(), host,
    limits=Limits(2, 3), timeout=timedelta(seconds=60), heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S},
)
membership.limits = Limits(3, 3)  # found the job together
membership.start({{}})
membership.limits = Limits(2, 3)

def cut():
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    time.sleep({CUT_S})
    subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    print("healed", time.monotonic(), flush=True)

flight, longest_s, last_s, end_s = 0, 0.0, time.monotonic(), time.monotonic() + 25.0
try:
    while time.monotonic() < end_s:
        view = membership.agree(flight, flight)
        if flight == 4 and node == 2:
            threading.Thread(target=cut).start()
            time.sleep(0.5)
        try:
            view.channel.all_gather(torch.tensor([node]), "test").wait()
        except RuntimeError as error:
            print("failed", error, flush=True)
            membership.failed()
            continue
        flight += 1
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        time.sleep(0.2)
    print("members", *view.members, "flights", flight, "longest", longest_s, flush=True)
except RuntimeError as error:
    print("ended", time.monotonic(), error, flush=True)
os._exit(0)
"""

pytestmark = [
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
    pytest.mark.skipif(
        find_spec("torchft") is None, reason="torchft has packages for Linux on x86_64 only"
    ),
]


def test_a_replica_that_is_cut_off_is_left_behind_and_told() -> None:
    with NetLab(3, rate=None) as lab:
        jobs = [[sys.executable, "-c", JOB, str(node)] for node in range(3)]
        results = lab.run(jobs, timeout_s=150, env={"PYTHONPATH": str(ROOT)})
    first, second, cut_off = (result.output for result in results)
    for output in (first, second):
        words = output.split()
        assert words[words.index("members") + 1 : words.index("flights")] == ["0", "1"], output
        assert int(words[words.index("flights") + 1]) > 20, output
        assert float(words[words.index("longest") + 1]) < HEARTBEAT_TIMEOUT_S + 6.0, output
    words = cut_off.split()
    healed_s = float(words[words.index("healed") + 1])
    assert float(words[words.index("ended") + 1]) - healed_s < 15.0, cut_off
    assert "continued without this one" in cut_off, cut_off
