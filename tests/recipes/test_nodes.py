"""Two machines, each a network namespace with an interface of its own, train to the end together.

As torchrun starts them, and as SLURM's srun does, of which the environment is played here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from benchmarks.lab import NetLab, netlab

UNAVAILABLE = netlab.why_unavailable()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

STEPS = 12
COMMAND = [
    sys.executable,
    "-m",
    "recipes.pretrain",
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
    "trainer.num_nodes=2",
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
TORCHRUNS = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_RUN_ID")  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    with NetLab(nodes=2, rate="100mbit") as laboratory:
        yield laboratory


def _by_srun(node: int) -> list[str]:
    unset = [word for name in TORCHRUNS for word in ("-u", name)]
    told = {**SLURM, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)}
    return ["env", *unset, *(f"{name}={value}" for name, value in told.items())]


@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_two_nodes_train_to_the_end(by, lab, tmp_path) -> None:
    folders = [f"hydra.run.dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"]
    commands = [
        [*(_by_srun(node) if by == "srun" else []), *COMMAND, *folders] for node in range(2)
    ]
    environment = {"OMP_NUM_THREADS": "1"}
    results = lab.run(commands, timeout_s=100, env=environment)
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
