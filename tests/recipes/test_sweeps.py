"""`-m` with any launcher gives right results or a sentence; so do several nodes."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.types import RunMode

from recipes.training.launch import check_launch, check_sweep, launched_outside, with_launcher
from recipes.training.pretraining import build
from recipes.training.run import fit
from tests.forks import Fork

ROOT = Path(__file__).parents[2]
TINY = [
    "strategy=ddp",
    "data=synthetic",
    "tokenizer=bytes",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=1000",
    "data.block_size=16",
    "model.n_embd=256",  # so large that torch would copy weights with several threads
    "model.n_layer=1",
    "model.n_head=2",
    "optimizer.warmup_steps=0",
    "report.sample_tokens=2",
    "trainer.max_steps=4",
    "trainer.log_every_n_steps=1",
    "checkpoint_every_n_steps=0",
]


def test_one_and_two_processes_in_one_sweep(compose_config, tmp_path) -> None:
    """The second job forks from a process that has copied weights: with threads it would hang. Its
    world is its own, and its result that of the same job alone."""
    places = [f"hydra.sweep.dir={tmp_path}/sweep", f"cache_dir={tmp_path}/cache"]
    command = [sys.executable, "-m", "recipes.pretrain", "-m", *TINY, *places]
    with (tmp_path / "printed").open("w") as printed:
        process = Fork(
            [*command, "trainer.devices=1,2"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
            stdout=printed,
            first=partial(torch.set_num_threads, 2),
        )
        code = process.end(100)
    stdout = (tmp_path / "printed").read_text()
    assert code == 0, stdout
    jobs = [tmp_path / "sweep" / job for job in ("0", "1")]
    one, two = (json.loads((job / "summary.json").read_text()) for job in jobs)
    assert two["tokens"] == 2 * one["tokens"] == 2 * 4 * 16 * 16
    assert (one["bytes_sent"], two["bytes_sent"] > 0) == (0, True)
    assert "DDPStrategy on 1 rank" in stdout
    assert "DDPStrategy on 2 ranks" in stdout
    table = stdout[stdout.index("overrides") :]
    losses = (f"{one['validation_loss']:.4f}", f"{two['validation_loss']:.4f}")
    for number, loss in enumerate(losses):
        assert re.search(rf"{number} +│ trainer.devices={number + 1} +│ +{loss}", table), table
    assert table.count(" *") == 1, "the best one is marked"
    for job in jobs:
        for name in ("checkpoints/last.ckpt", "huggingface/config.json", "run.png"):
            assert (job / name).is_file()
        assert len((job / "csv/version_0/metrics.csv").read_text().splitlines()) >= 5

    alone = compose_config(*TINY, "trainer.devices=2", "logger=none")
    Path(alone["run_dir"]).mkdir()
    fit(alone, build)
    summary = json.loads((Path(alone["run_dir"]) / "summary.json").read_text())
    # one thread here, two there: sums in another order
    assert two["validation_loss"] == pytest.approx(summary["validation_loss"], rel=1e-5)
    assert one["validation_loss"] != pytest.approx(summary["validation_loss"], rel=1e-3)


def _hydra(launcher: str | None = None, mode: RunMode = RunMode.MULTIRUN):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("pretrain", [], return_hydra_config=True).hydra
    config.mode = mode
    if launcher is not None:
        config.launcher["_target_"] = f"hydra_plugins.{launcher}"
    return config


JOBLIB = "hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SUBMITIT = "hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@pytest.mark.parametrize(
    ("launcher", "start_method", "outside", "message"),
    [
        (
            None,
            "popen",
            False,
            "cannot be combined with strategy.start_method=popen: each child process",
        ),
        (None, "popen", True, "cannot be combined with torchrun and srun"),
        (None, "fork", True, "cannot be combined with torchrun and srun"),
        (SUBMITIT, "popen", False, "cannot be combined with strategy.start_method=popen"),
        (JOBLIB, "fork", False, "JoblibLauncher has not been tested with these recipes"),
    ],
)
def test_a_sweep_that_would_go_wrong(launcher, start_method, outside, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_sweep(_hydra(launcher), start_method, outside)
    check_sweep(_hydra(launcher, RunMode.RUN), start_method, outside)


def test_nodes_that_nobody_starts(compose_config, monkeypatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    config = compose_config("trainer=slurm", "strategy=ddp")
    with pytest.raises(ValueError, match="trainer.num_nodes=2, but torchrun, srun or LSF has"):
        check_launch(config)
    monkeypatch.setenv("NODE_RANK", "0")  # by hand, on every node
    check_launch(config)
    monkeypatch.delenv("NODE_RANK")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_JOB_NAME", "pretrain")
    assert launched_outside()
    check_launch(config)
    assert with_launcher(config)["strategy"]["start_method"] == "popen"
