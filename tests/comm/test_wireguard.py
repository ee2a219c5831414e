"""The tunnel of SECURITY.md closes the ports of a job to everybody outside it.

Three machines share an Ethernet: two are in the tunnel of `examples/elastic/wg0.conf`, made by the
commands of the page, and the third, which has no key, tries every port of the first two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import NetLab, why_unavailable

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "elastic"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
SETTLED_S = 3.0  # for a probe that nobody answers

# argv: its node, its configuration and a folder that all nodes share
MEMBER = """
import os, subprocess, sys, time
from pathlib import Path
import torch.distributed as dist
from lightning_commfree.stores.retrying import Retrying
from lightning_commfree.stores.tcp import TcpStore, serve

node, config, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
subprocess.run("mkdir -p /run/wireguard && mount -t tmpfs none /run/wireguard"
               f" && wg-quick up {config}", shell=True, check=True)
address = f"10.99.0.{node + 1}"
if node == 0:
    server = serve("10.99.0.1", 29510)
ranks_store = dist.TCPStore(address, 29600, is_master=True, wait_for_workers=False)
store = Retrying(TcpStore("10.99.0.1", 29510))
store.create(f"x/{node}", b"message")
while store.get(f"x/{1 - node}") != b"message":
    time.sleep(0.1)
rank_device = dist.ProcessGroupGloo.create_device(hostname=address)
ports = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout
(folder / f"ports{node}").write_text(ports)
print("met", flush=True)
for wait in ("closed", "open"):
    while not (folder / wait).exists():
        time.sleep(0.1)
    if wait == "closed":
        subprocess.run(["nft", "delete", "table", "inet", "commfree"], check=True)
        (folder / f"without{node}").touch()
os._exit(0)
"""

OUTSIDER = """
import socket, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.1)

def reached():
    found = []
    for node in (0, 1):
        for host in (f"10.77.0.{node + 1}", f"10.99.0.{node + 1}"):
            for port in ports[node]:
                try:
                    socket.create_connection((host, port), timeout=0.5).close()
                    found.append(f"{host}:{port}")
                except OSError:
                    pass
    return found

wait_for("ports0", "ports1")
time.sleep(0.2)
ports = [sorted({int(line.split()[3].rpartition(":")[2]) for line in
                 (folder / f"ports{node}").read_text().splitlines()}) for node in (0, 1)]
# Linux delivers a packet for any of a machine's addresses, whichever interface it comes from
for node in (0, 1):
    subprocess.run(["ip", "route", "add", f"10.99.0.{node + 1}", "via", f"10.77.0.{node + 1}"],
                   check=True)
print("with", *reached(), flush=True)
(folder / "closed").touch()
wait_for("without0", "without1")
print("without", *reached(), flush=True)
(folder / "open").touch()
"""


def why_not() -> str | None:
    """Return why this machine cannot make the tunnel."""
    needed = {
        "wg-quick": "wireguard-tools",
        "wireguard-go": "wireguard-go",
        "nft": "nftables",
        "ss": "iproute2",
    }
    packages = [package for tool, package in needed.items() if not shutil.which(tool, path=PATH)]
    if packages:
        return f"The tunnel needs `apt-get install {' '.join(packages)}`."
    if not Path("/dev/net/tun").exists():
        return "The tunnel needs /dev/net/tun, which this machine does not have."
    return why_unavailable()


@pytest.fixture
def configurations(tmp_path: Path) -> list[Path]:
    """The recipe's files for two machines, with what it leaves to fill in."""
    keys = []
    for _ in range(2):
        private = run("wg", "genkey")
        keys.append((private, run("wg", "pubkey", given=private)))
    folders = []
    for node in range(2):
        folder = tmp_path / f"machine{node}"
        folder.mkdir()
        text = (RECIPE / "wg0.conf").read_text(encoding="utf-8")
        mine, other = f"10.99.0.{node + 1}", f"10.99.0.{2 - node}"
        for before, after in {
            "10.99.0.1/24": f"{mine}/24",
            "10.99.0.2/32": f"{other}/32",
            "PRIVATE_KEY": keys[node][0],
            "PUBLIC_KEY": keys[1 - node][1],
            "ADDRESS": f"10.77.0.{2 - node}",
            "/etc/wireguard": str(RECIPE),
        }.items():
            assert before in text
            text = text.replace(before, after)
        (folder / "wg0.conf").write_text(text, encoding="utf-8")
        (folder / "wg0.conf").chmod(0o600)
        folders.append(folder / "wg0.conf")
    return folders


def run(*command: str, given: str = "") -> str:
    result = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": PATH},
    )
    return result.stdout.strip()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_tunnel_closes_every_port_to_those_outside(
    configurations: list[Path], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    jobs = [
        *(
            [sys.executable, "-c", MEMBER, str(node), str(configuration), str(shared)]
            for node, configuration in enumerate(configurations)
        ),
        [sys.executable, "-c", OUTSIDER, str(shared)],
    ]
    with NetLab(3, rate=None) as lab:
        results = lab.run(jobs, timeout_s=150, env={"PYTHONPATH": str(ROOT), "PATH": PATH})
    output = "\n".join(result.output for result in results)
    assert [result.returncode for result in results] == [0, 0, 0], output
    assert all("met" in result.output.split() for result in results[:2]), output
    closed, opened = (line.split() for line in results[2].output.splitlines()[-2:])
    assert closed == ["with"], "what an outsider reaches in spite of tunnel and firewall"
    # the firewall is needed: without it, an outsider reaches the tunnel's address by Ethernet
    assert "10.99.0.1:29510" in opened, opened
    assert "10.77.0.1:29510" not in opened, "the store listens in the tunnel only"
