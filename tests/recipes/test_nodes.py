"""Two machines, each a network namespace with an interface of its own, train to the end together.

By the commands of `recipes/README.md`, on machines as Debian installs them, and as SLURM's srun
starts them, of which the environment is played here.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import NetLab, netlab
from tests.forks import ForkedLab, run_python, run_typed
from tests.pages import ROOT, commands_of, on_machines

UNAVAILABLE = netlab.why_unavailable()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

STEPS = 12
SMALL = [
    "strategy=streaming_diloco",
    "strategy.sync_every=4",
    "data=synthetic",
    "tokenizer=bytes",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=2000",
    "data.block_size=16",
    "model.n_embd=16",
    "model.n_layer=3",
    "model.n_head=2",
    "optimizer.warmup_steps=2",
    "report.sample_tokens=2",
    f"trainer.max_steps={STEPS}",
    "trainer.devices=1",
]
# what srun tells the task of a job with two nodes and one task on each
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "pretrain",
    "SLURM_NODELIST": "node[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_LOCALID": "0",
}
README = commands_of((ROOT / "recipes/README.md").read_text("utf-8"))
DOCUMENTED = {"torchrun": "--node-rank ", "hand": "NODE_RANK="}


def _task(node: int, unset: list[str], settings: list[str]) -> None:
    """Act as the task that srun starts on a node."""
    for name in unset:
        del os.environ[name]
    os.environ.update(SLURM, SLURM_PROCID=str(node), SLURM_NODEID=str(node))
    run_python("-m", "recipes.pretrain", "trainer.num_nodes=2", *settings)


def _by_srun(lab: NetLab, settings: list[str]) -> list[list[Any]]:
    return [[_task, node, list(lab.environment(node)), settings] for node in range(2)]


def _as_documented(by: str, lab: NetLab, settings: list[str]) -> list[list[Any]]:
    """Return the page's command for each machine, with a small model on one CPU rank."""
    (command,) = (command for command in README if DOCUMENTED[by] in command)
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1")
    command = re.sub(r"hydra.run.dir=\S+", "", command)
    cpu = ["trainer.accelerator=cpu", "trainer.precision=32-true"]
    typed = on_machines(" ".join([command, *cpu, *settings]), lab.address(0))
    return [[run_typed, one] for one in typed]


@pytest.mark.parametrize("by", [*DOCUMENTED, "srun"])
def test_two_nodes_train_to_the_end(by: str, tmp_path: Path) -> None:
    settings = [*SMALL, f"hydra.run.dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"]
    with ForkedLab(nodes=2, rate="100mbit", fresh=by in DOCUMENTED) as lab:
        start = partial(_as_documented, by) if by in DOCUMENTED else _by_srun
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        results = lab.run(start(lab, settings), timeout_s=100, env=environment)
    assert [result.returncode for result in results] == [0, 0], results[0].output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["tokens"] == STEPS * 2 * 16 * 16, "two ranks with a batch each"
    assert summary["validation_loss"] < summary["unigram_loss"] + 3
    # what the ledger counts has crossed the wire, and not more than the rest of the talk besides
    assert 0 < summary["bytes_sent"] < results[0].sent_bytes
    assert "StreamingDiLoCoStrategy on 2 ranks" in results[0].output
    assert "After training" not in results[1].output, "rank 0 alone speaks"
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
