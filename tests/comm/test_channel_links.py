"""The links under a channel: a peer that is gone, and what is counted against what is sent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import (
    Ledger,
    all_gather_bytes,
    all_to_all_bytes,
    broadcast_bytes,
    ring_all_reduce_bytes,
)
from tests.world import run_ranks

# A peer that is gone

PATIENCE = timedelta(seconds=4)


# The ledger against the network interface

CLONE_NEWNET = 0x4000_0000  # of linux/sched.h; `os.unshare` comes with Python 3.12
SENDERS = 3  # with two ranks b (n - 1) and b are the same, and some mistakes are not seen
NUMEL = SENDERS * 400_000  # fp32: 4.8 MB
ROUNDS = 3
TOLERANCE = 0.02  # headers of TCP and IP, 64 KB a packet here, and the barriers

FORMULAS = {
    "all_reduce": ring_all_reduce_bytes,
    "all_gather": all_gather_bytes,
    "all_to_all": all_to_all_bytes,
    "broadcast": broadcast_bytes,
}
# what a plausible wrong formula says of b bytes and n ranks
MISTAKES = {
    "all_reduce": lambda b, n: b * (n - 1) / n,  # reduce-scatter without the gather
    "all_gather": lambda b, n: b * (n - 1) / n,  # b taken for the gathered size
    "all_to_all": lambda b, n: b,  # counts what stays at home
    "broadcast": lambda b, n: b,  # every rank as if it were a receiver
}


def bytes_on_the_interface() -> int:
    """Bytes sent over `lo` in the network namespace of this process.

    /proc/self follows the process; /sys/class/net shows the namespace it was mounted in.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("there is no interface `lo`")


def send_and_look(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """For every collective: what the ledger counts, and what all ranks put on the interface.

    The least of some rounds: now and then TCP sends a piece a second time.
    """
    channel = Channel.open([list(range(size))], rank, Ledger())
    tensor = torch.ones(size, NUMEL // size)
    counted: dict[str, tuple[int, int]] = {}
    for name in ["nothing", *FORMULAS] * ROUNDS:
        dist.barrier()
        on_interface, in_ledger = bytes_on_the_interface(), channel.ledger.bytes_sent
        dist.barrier()
        if name != "nothing":
            getattr(channel, name)(tensor, "t").wait()
        dist.barrier()
        in_ledger = channel.ledger.bytes_sent - in_ledger
        seen = (in_ledger, bytes_on_the_interface() - on_interface)
        counted[name] = min(seen, counted.get(name, seen))
    return counted


def in_own_network(folder: Path, function: Any, size: int) -> None:
    """Run `function` on ranks in a network of their own; save what they return."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    assert bytes_on_the_interface() == 0, "a new network has sent nothing"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.save(run_ranks(function, size, folder), folder / "outcome.pt")


def may_make_networks() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip") or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


def test_the_ledger_counts_what_crosses_the_interface(tmp_path: Path) -> None:
    """The ranks run in a network of their own, where nobody else sends."""
    if not may_make_networks():
        pytest.skip("a network of its own needs Linux, root, `unshare` and `ip`")
    child = multiprocessing.get_context("fork").Process(
        target=in_own_network, args=(tmp_path, send_and_look, SENDERS)
    )
    child.start()
    child.join(timeout=60)
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0
    ranks = torch.load(tmp_path / "outcome.pt")
    idle = ranks[0]["nothing"][1]
    assert ranks[0]["nothing"][0] == 0
    payload = 4 * NUMEL
    for name, formula in FORMULAS.items():
        in_ledger = [counted[name][0] for counted in ranks]
        assert in_ledger == [formula(payload, SENDERS)] * SENDERS, name
        crossed = ranks[0][name][1] - idle
        assert crossed == pytest.approx(sum(in_ledger), rel=TOLERANCE), name
        mistaken = SENDERS * MISTAKES[name](payload, SENDERS)
        assert crossed != pytest.approx(mistaken, rel=TOLERANCE), f"{name}: the test sees nothing"
