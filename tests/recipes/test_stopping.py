"""A run that a signal ends goes on from its checkpoint to where it would have come without it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch

from recipes.training.pretraining import build
from recipes.training.run import fit
from recipes.training.stopping import _exit_code
from tests.fit.slurm import slurm_job

STEPS, SAVED = 30, 10  # of a run, and before its first checkpoint
SMALL = [
    "data=synthetic",
    "tokenizer=bytes",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=2000",
    "data.block_size=16",
    "data.batch_size=8",
    "model.n_embd=16",
    "model.n_layer=1",
    "model.n_head=2",
    f"trainer.max_steps={STEPS}",
    "trainer.accumulate_grad_batches=2",  # of which a stop must not cut any
    "trainer.val_check_interval=20",
    f"checkpoint_every_n_steps={SAVED}",
    "optimizer.warmup_steps=5",
    "report.sample_tokens=1",
    "logger=none",
]
DDP = ["strategy=ddp"]
DILOCO = ["strategy=streaming_diloco", "strategy.sync_every=5"]
FORETOLD = re.compile(r"all ranks stop together, after step (\d+) at the latest")
LION = ["strategy=distributed_lion", "optimizer=distributed_lion"]


class Slow(pl.Callback):
    """Makes batches behind the first checkpoint slow, so that a signal arrives in the middle."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= SAVED:
            time.sleep(self.seconds)


def _slow(seconds: float) -> str:
    return f"+callbacks.slow={{_target_: {__name__}.Slow, seconds: {seconds}}}"


class Job:
    """A run in a process group of its own, as a terminal starts it; speaks into a file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.run = Path(config["run_dir"])
        self.run.mkdir(exist_ok=True)
        self.log = self.run / "log.txt"
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=self._main, args=(config,))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _main(self, config: dict[str, Any]) -> None:
        os.setsid()
        # a shell may have left it ignored for its background jobs, and tests may be one
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # as in a process of its own: an earlier test's library may have let the root logger speak
        logging.getLogger().setLevel(logging.WARNING)
        with self.log.open("a", buffering=1) as sys.stdout:
            sys.stderr = sys.stdout
            fit(config, build)

    def wait_for(self, name: str) -> None:
        """Return when the run has written the checkpoint `name`."""
        deadline = time.monotonic() + 60
        while not (self.run / "checkpoints" / name).exists():
            assert self._process.is_alive(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)

    def exit_code(self) -> int | None:
        self._process.join(60)
        assert not self._process.is_alive(), self.log.read_text()
        return self._process.exitcode


def _result(run: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss that a finished run reports, and its final weights."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == STEPS
    return json.loads((run / "summary.json").read_text())["validation_loss"], checkpoint[
        "state_dict"
    ]


@pytest.fixture
def start(compose_config: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Job]:
    def started(folder: str, *overrides: str) -> Job:
        return Job({**compose_config(*SMALL, *overrides), "run_dir": str(tmp_path / folder)})

    return started


def stopped_at(said: str) -> int:
    found = re.search(r"Stopped by \w+ after step (\d+)", said)
    assert found is not None, said
    return int(found[1])


def _to_launcher(job: Job, signum: int) -> None:
    os.kill(job.pid, signum)


def _to_all(job: Job, signum: int) -> None:
    os.killpg(job.pid, signum)


def _to_rank_1(job: Job, signum: int) -> None:
    ranks = psutil.Process(job.pid).children()
    ranks[1].send_signal(signum)


@pytest.mark.parametrize(
    ("strategy", "send", "signum"),
    [
        (DDP, _to_rank_1, signal.SIGTERM),
        (DILOCO, _to_launcher, signal.SIGINT),
        (LION, _to_all, signal.SIGINT),
    ],
    ids=["ddp-term", "diloco-int", "lion-int"],
)
def test_an_ended_run_continues_to_the_same_weights(start, strategy, send, signum) -> None:
    whole = start("whole", *strategy)
    assert whole.exit_code() == 0, whole.log.read_text()
    job = start("ended", *strategy, _slow(0.05))
    job.wait_for(f"step-{SAVED}.ckpt")
    send(job, signum)
    assert job.exit_code() == 128 + signum, job.log.read_text()
    assert not (job.run / "summary.json").exists()
    name = signal.Signals(signum).name
    said = job.log.read_text()
    assert f"Stopped by {name} after step" in said
    assert name == "SIGTERM" or "SIGTERM" not in said, "the ranks know who asked their launcher"
    assert "ckpt_path=last" in said
    assert "] Received SIGTERM" not in said, "every rank's word, instead of one that says more"
    if send is not _to_rank_1:
        assert said.count("A second Ctrl-C ends it at once") == 1
    assert all(int(step) >= stopped_at(said) for step in FORETOLD.findall(said))
    assert len(FORETOLD.findall(said)) == (strategy is not DDP), "the strategies' own word"
    if strategy is DILOCO:
        assert "A second Ctrl-C would lose all steps after" in said, "the last step is not near"
    stopped = torch.load(job.run / "checkpoints" / "last.ckpt", weights_only=True)
    assert SAVED <= stopped["global_step"] < STEPS

    resumed = start("ended", *strategy, "ckpt_path=last")
    assert resumed.exit_code() == 0, resumed.log.read_text()
    assert not re.search("Cannot resume exactly|not resumed exactly", resumed.log.read_text())
    (loss, weights), (expected_loss, expected) = _result(resumed.run), _result(whole.run)
    assert loss == expected_loss
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_a_second_ctrl_c_ends_at_once(start) -> None:
    job = start("run", *DDP, _slow(20.0))
    job.wait_for(f"step-{SAVED}.ckpt")
    processes = psutil.Process(job.pid).children()
    assert len(processes) == 2
    begin = time.monotonic()
    _to_all(job, signal.SIGINT)
    time.sleep(1.0)  # signals of one kind that come together count as one
    _to_all(job, signal.SIGINT)
    assert job.exit_code() == -signal.SIGINT
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert time.monotonic() - begin < 15, "shorter than the step that a first one would wait for"
    assert not (job.run / "checkpoints" / "last.ckpt").exists()


def test_only_rank_0_of_a_slurm_job_exits_with_an_error(tmp_path: Path) -> None:
    codes = []
    for rank in range(2):
        with slurm_job(tmp_path, rank, 2):
            trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
            codes.append(_exit_code(trainer, signal.SIGTERM))
    # otherwise `srun --kill-on-bad-exit` kills rank 0 when another rank exits before it
    assert codes == [143, 0]
