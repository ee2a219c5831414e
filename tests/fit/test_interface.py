"""Two machines, network namespaces: over which interface and backend ranks find each other."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.lab import netlab
from benchmarks.lab.nodes import command_output, parse_counters
from lightning_commfree import DistributedLionStrategy, DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.channel import Channel
from lightning_commfree.fit import ranks
from tests.fit.models import Voter, loader, quiet_trainer
from tests.forks import ForkedLab

UNAVAILABLE = netlab.why_unavailable()
needs_namespaces = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

# before the job: a hosts file as Debian's, in this node's own mount
DEBIAN = """
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$(hostname)" > "$1/$(hostname)"
if [ "$(hostname)" != node0 ]; then echo '10.77.0.1 node0' >> "$1/$(hostname)"; fi
mount --bind "$1/$(hostname)" /etc/hosts
"""


def fit(setup: str, folder: Path) -> None:
    """Run a shell script that sets up this machine, then train on two machines."""
    subprocess.run(["sh", "-c", setup, "sh", str(folder)], check=True)
    strategy = DistributedLionStrategy(timeout=timedelta(seconds=20))
    trainer = quiet_trainer(strategy=strategy, devices=1, num_nodes=2, max_steps=3)
    trainer.fit(Voter(), loader(40))
    assert not os.environ.get("GLOO_SOCKET_IFNAME")
    assert trainer.global_step == 3


def fit_on_both_nodes(lab: ForkedLab, setup: str, folder: Path, **variables: str) -> None:
    env = {"GLOO_SOCKET_IFNAME": "", **variables}
    for result in lab.run([[fit, setup, folder]] * 2, timeout_s=120, env=env):
        assert result.returncode == 0, result.output[-2000:]
        assert result.sent_bytes > 0


@needs_namespaces
def test_the_ranks_find_each_other(tmp_path: Path) -> None:
    """`node0` means 127.0.1.1 on node0 itself, where the only other interface is taken."""
    with ForkedLab(nodes=2, rate=None) as lab:
        fit_on_both_nodes(lab, DEBIAN, tmp_path, MASTER_ADDR="node0")


# Of another interface of node 1, with the default route and the host name. It is below the other
# addresses: gloo connects from the higher one to the lower one.
WRONG = "10.1.0.1"
# torch asks for the names of addresses, and a name server may be anywhere
NO_NAMES = """
echo nameserver 127.0.0.1 > "$1/$RANK" && mount --bind "$1/$RANK" /etc/resolv.conf
"""


@needs_namespaces
def test_nothing_connects_over_another_interface_that_has_the_default_route(tmp_path: Path) -> None:
    """gloo by itself would listen where the host name points, and node 0 could not reach it."""
    with ForkedLab(nodes=2, rate=None) as lab:
        space = lab._namespace(1)
        for setup in (
            "link add wan0 type veth peer name wan1",
            "link set wan0 addrgenmode none",  # no IPv6, which would send by itself
            "link set wan1 addrgenmode none up",
            f"address add {WRONG}/24 dev wan0",
            "link set wan0 up",
            f"route add default via {WRONG} dev wan0",
        ):
            command_output("ip", "-n", space, *setup.split())
        hosts = lab._hosts(1)
        hosts.write_text(hosts.read_text().replace(lab.address(1), WRONG))
        fit_on_both_nodes(lab, NO_NAMES, tmp_path)
        table = command_output("ip", "netns", "exec", space, "cat", "/proc/self/net/dev")
        assert parse_counters(table, "wan0") == (0, 0)


DILOCO, LION = StreamingDiLoCoStrategy, DistributedLionStrategy
GROUPS: dict[str, tuple[Callable[..., Any], int, str, str]] = {  # machines, world, within
    "replicas": (partial(DILOCO, replica_size=2), 2, "gloo", "nccl"),
    "replicas with Domino": (partial(DILOCO, replica_size=2, inside="domino"), 2, "gloo", "nccl"),
    "nodes of Lion": (partial(LION, node_size=2), 2, "gloo", "nccl"),
    "one machine": (partial(DILOCO, replica_size=2), 1, "nccl", "nccl"),
    "Domino": (partial(DominoTPStrategy, tensor_parallel_size=2), 2, "nccl", "nccl"),
    "the user's nccl": (
        partial(DILOCO, replica_size=2, process_group_backend="nccl"),
        *(2, "nccl", "nccl"),
    ),
    "the user's gloo": (
        partial(DILOCO, replica_size=2, process_group_backend="gloo"),
        *(1, "gloo", "gloo"),
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_between_replicas_on_several_machines_every_group_is_gloo(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl connected all machines at start, over an interface that nobody had chosen."""
    make, nodes, world, within = GROUPS[name]
    opened: list[str] = []
    near: set[str] = set()

    def open_channel(
        groups: Any, rank: int, ledger: Any, backend: str = "gloo", *_: Any, **__: Any
    ) -> Channel:
        near.add(backend)
        return Channel([rank], rank, ledger)

    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: opened.append(backend))
    monkeypatch.setattr(Channel, "open", open_channel)
    monkeypatch.setattr(ranks, "delay_exit", lambda hosts_store: None)
    for variable, value in (
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ):
        monkeypatch.setenv(variable, value)
    devices = [torch.device("cuda", i) for i in range(2)]
    strategy = make(cluster_environment=LightningEnvironment(), parallel_devices=devices)
    strategy.num_nodes = nodes
    for _ in range(2):  # Lightning keeps the backend of the first time
        strategy.ranks.join(strategy.setup_distributed)
        strategy.ranks.leave()
    assert opened == [world, world]
    assert near == {"gloo", within}


@pytest.mark.parametrize(
    ("nodes", "said"), [(2, "cannot connect to each other (Gloo conn"), (1, "Gloo")]
)
def test_unreachable_ranks_are_told_which_variable_to_set(
    nodes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: DDPStrategy) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with ... remote=[127.0.1.1]:40000")

    monkeypatch.setattr(DDPStrategy, "setup_environment", fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    strategy = DistributedLionStrategy(
        cluster_environment=LightningEnvironment(), parallel_devices=[torch.device("cpu")]
    )
    strategy.num_nodes = nodes
    with pytest.raises(RuntimeError, match=re.escape(said)) as caught:
        strategy.setup_environment()
    assert ("gloo listens on eth7," in str(caught.value)) == (nodes == 2)
    assert ("On every host, set GLOO_SOCKET_IFNAME" in str(caught.value)) == (nodes == 2)
