"""Two elastic replicas that cannot reach each other train through a store that both reach."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab import NetLab, why_unavailable
from benchmarks.lab.nodes import command_output
from lightning_commfree import ElasticDiLoCoStrategy
from lightning_commfree.host import pl
from lightning_commfree.stores.tcp import serve
from tests.elastic.fits import Pace, fit, wait_until
from tests.forks import ForkedLab

STORE, PORT, MEMBERS = 0, 29510, (1, 2)  # nodes
SETTINGS: dict[str, Any] = {"sync_every": 6, "num_fragments": 2, "overlap_steps": 2}


def host(node: int) -> str:
    return f"10.77.0.{node + 1}"


def give_a_route_to_the_store_alone(lab: NetLab, node: int) -> None:
    for words in (
        "address flush dev eth0",
        f"address add {host(node)}/32 dev eth0",
        f"route add {host(STORE)} dev eth0",
    ):
        command_output("ip", "-n", lab._namespace(node), *words.split())


def play_store(folder: Path) -> None:
    server = serve(host(STORE), PORT)
    wait_until(lambda: all((folder / f"fit{node}").exists() for node in MEMBERS), 100.0)
    del server


def listening() -> list[str]:
    """Return the lines of all listening TCP sockets in this network namespace."""
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    return [line for table in tables for line in table[1:] if line.split()[3] == "0A"]


def connect(node: int, port: int) -> int | None:
    """Connect to a node, and return the number of the error."""
    try:
        socket.create_connection((host(node), port), 2.0).close()
    except OSError as error:
        return error.errno
    return None


def play_member(node: int, folder: Path) -> None:
    torch.set_num_threads(1)
    (other,) = {*MEMBERS} - {node}

    def look(trainer: pl.Trainer) -> None:
        assert listening() == []
        assert connect(STORE, PORT) is None
        assert connect(other, PORT) == errno.ENETUNREACH
        (folder / f"looked{node}").touch()

    strategy = ElasticDiLoCoStrategy(f"tcp://{host(STORE)}:{PORT}", min_replicas=2, **SETTINGS)
    found = fit(strategy, Pace(0.01, 20, look), max_steps=40)
    assert not found.error, found.error
    torch.save(found.state, folder / f"saving{node}")
    (folder / f"saving{node}").rename(folder / f"fit{node}")


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_replicas_without_a_route_to_each_other_train(tmp_path: Path) -> None:
    with ForkedLab(1 + len(MEMBERS), rate=None, fresh=True) as lab:
        for node in MEMBERS:
            give_a_route_to_the_store_alone(lab, node)
        forwarding = ["sysctl", "-n", "-w", "net.ipv4.ip_forward=0"]
        in_store = ["ip", "netns", "exec", lab._namespace(STORE)]
        assert command_output(*in_store, *forwarding).strip() == "0"
        jobs = [[play_store, tmp_path], *([play_member, node, tmp_path] for node in MEMBERS)]
        results = lab.run(jobs, timeout_s=120)
    output = "\n".join(result.output for result in results)
    assert [result.returncode for result in results] == [0, 0, 0], output
    assert all((tmp_path / f"looked{node}").exists() for node in MEMBERS)
    first, second = (torch.load(tmp_path / f"fit{node}") for node in MEMBERS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
