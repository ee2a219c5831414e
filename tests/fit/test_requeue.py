"""SLURM's signal before a time limit: the ranks stop together, save, requeue the job once, and the
next run of the job goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.host import SIGTERMException, pl
from tests.fit import causal_lm
from tests.fit.any_strategy import KINDS, Voter, make_strategy
from tests.fit.models import Noisy, Recorder, assert_same, loader, quiet_trainer
from tests.fit.slurm import JOB, slurm_job
from tests.world import run_ranks

STEPS = 8


class Signals(pl.Callback):
    """Sends SLURM's signal to some ranks in a batch."""

    def __init__(self, ranks: tuple[int, ...], signum: int = signal.SIGUSR1) -> None:
        self.ranks, self.signum = ranks, signum

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.signum)


def fit(kind: str, size: int, folder: Path, *callbacks: pl.Callback) -> Any:
    """Fit without `ckpt_path`; return how it ended, its steps and its weights after each."""
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=make_strategy(kind, size),
        devices=size,
        max_steps=STEPS,
        default_root_dir=folder,
        callbacks=[recorder, *callbacks],
    )
    text = kind == "domino"
    module = causal_lm.CausalLM() if text else Noisy() if kind == "diloco" else Voter()
    data = causal_lm.loader(40, 2) if text else loader(40)
    try:
        trainer.fit(module, data)
    except SIGTERMException:
        return "SIGTERM", trainer.global_step, recorder.local
    return "done", trainer.global_step, recorder.local


def straight_and_requeued(rank: int, size: int, folder: Path, kind: str, ranks: Any) -> Any:
    straight = fit(kind, size, folder / "straight")
    with slurm_job(folder, rank, size):
        stopped = fit(kind, size, folder, Signals(ranks))
        return straight, stopped, fit(kind, size, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_job_is_saved_requeued_and_resumed(
    tmp_path: Path, kind: str, ranks: tuple[int, ...]
) -> None:
    outcomes = run_ranks(straight_and_requeued, 2, tmp_path, tmp_path, kind, ranks)
    for (_, _, straight), (stopped, step, _), (resumed, last, local) in outcomes:
        assert (stopped, resumed, last) == ("SIGTERM", "done", STEPS)
        assert 2 < step < STEPS
        assert_same(local, straight[step:])
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {JOB}\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


def sigterm(rank: int, size: int, folder: Path) -> Any:
    with slurm_job(folder, rank, size):
        return fit("diloco", size, folder, Signals((1,), signal.SIGTERM))[:1]


def test_sigterm_requeues_nothing(tmp_path: Path) -> None:
    assert run_ranks(sigterm, 2, tmp_path, tmp_path) == [("SIGTERM",)] * 2
    assert not (tmp_path / "scontrol.txt").exists()
    assert not list(tmp_path.glob("hpc_ckpt_*"))
