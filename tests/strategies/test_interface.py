"""Two machines, network namespaces, whose host names point to 127.0.1.1, as Debian writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.lab import NetLab, netlab
from lightning_commfree import DistributedLionStrategy

UNAVAILABLE = netlab.why_unavailable()
needs_namespaces = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

# before the job: a hosts file as Debian's, in this node's own mount
DEBIAN = """
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$(hostname)" > "$1/$(hostname)"
if [ "$(hostname)" != node0 ]; then echo '10.77.0.1 node0' >> "$1/$(hostname)"; fi
mount --bind "$1/$(hostname)" /etc/hosts && shift && exec "$@"
"""
JOB = """
import os, sys
from datetime import timedelta
from lightning_commfree import DistributedLion, DistributedLionStrategy
from tests.strategies.models import Tiny, loader, quiet_trainer

class Voter(Tiny):
    def configure_optimizers(self):
        return DistributedLion(self.parameters(), lr=1e-3)

strategy = DistributedLionStrategy(timeout=timedelta(seconds=20))
trainer = quiet_trainer(strategy=strategy, devices=1, num_nodes=2, max_steps=3)
trainer.fit(Voter(), loader(40))
assert "GLOO_SOCKET_IFNAME" not in os.environ or not os.environ["GLOO_SOCKET_IFNAME"]
print("steps", trainer.global_step)
"""


@needs_namespaces
def test_the_ranks_find_each_other(tmp_path: Path) -> None:
    """`node0` means 127.0.1.1 on node0 itself, where the only other interface is taken."""
    command = ["sh", "-c", DEBIAN, "sh", str(tmp_path), sys.executable, "-c", JOB]
    env = {"GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": "node0", "PYTHONPATH": ":".join(sys.path)}
    with NetLab(nodes=2, rate=None) as lab:
        for result in lab.run([command] * 2, timeout_s=120, env=env):
            assert result.returncode == 0, result.output[-2000:]
            assert "steps 3" in result.output


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
