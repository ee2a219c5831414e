"""Fits in which one rank kills itself at a chosen moment, and what must be true after that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import WIDTH, Recorder, Tiny, quiet_trainer, rank_loader
from tests.mortal import End, run_jobs, start_mortals
from tests.world import run_ranks

TIMEOUT = timedelta(seconds=20)
SAVE_EVERY = 7

Train = Callable[..., Recorder]
Steps = list[dict[str, Tensor]]  # the parameters after every step


class Run(NamedTuple):
    """The outcome of a fit in which a rank died."""

    folder: Path  # its checkpoints are below `saved`
    ends: list[End]
    died_s: float  # on the clock of `time.monotonic`


def train(
    rank: int,
    size: int,
    folder: Path,
    *callbacks: pl.Callback,
    settings: dict[str, Any],
    steps: int,
    width: int = WIDTH,
    **fit: Any,
) -> Recorder:
    """Fit for `steps` steps with a checkpoint in `folder` after every 7th."""
    recorder = Recorder()
    save = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=SAVE_EVERY, save_last=False
    )
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(timeout=TIMEOUT, **settings),
        devices=size,
        enable_checkpointing=True,
        callbacks=[recorder, *callbacks, save],
        max_steps=steps,
        use_distributed_sampler=False,
    )
    trainer.fit(Tiny(width=width), rank_loader(2 * steps * size, 2, rank, size), **fit)
    return recorder


class Clock(pl.Callback):
    """Knows the inner step that is running or has just run, in this process."""

    step = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        Clock.step = trainer.global_step + 1


def die(folder: Path) -> None:
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(
    owner: type, name: str, moment: str, step: int, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """Die before or after a method's first call from inner step `step` on, in any thread."""
    original = getattr(owner, name)

    def mortal(self: Any, *args: Any, **kwargs: Any) -> Any:
        due = Clock.step >= step
        if due and moment == "before":
            die(folder)
        result = original(self, *args, **kwargs)
        if due and moment == "after":
            die(folder)
        return result

    patch.setattr(owner, name, mortal)


def run_phases(
    phases: Iterable[str],
    size: int,
    train_and_die: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:
    """Run `train_and_die(rank, size, folder, phase)` on `size` ranks for every phase."""
    folders = {phase: tmp_path_factory.mktemp("phase") for phase in phases}
    jobs = [
        partial(start_mortals, train_and_die, size, folder, folder, phase, timeout=TIMEOUT)
        for phase, folder in folders.items()
    ]
    return {
        phase: Run(folder, ends, float((folder / "died").read_text()))
        for (phase, folder), ends in zip(folders.items(), run_jobs(jobs), strict=True)
    }


def last_checkpoint(run: Run) -> Path:
    files = (run.folder / "saved").glob("*.ckpt")
    return max(files, key=lambda path: int(path.stem.split("=")[1]))


def resume_phases(
    killed: dict[str, Run], size: int, train: Train, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Steps, dict[str, Steps]]]:
    """Return, rank by rank, the uninterrupted run and those from each phase's last checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")
    checkpoints = {phase: last_checkpoint(run) for phase, run in killed.items()}
    return run_ranks(_resume, size, folder, folder, checkpoints, train)


def _resume(
    rank: int, size: int, folder: Path, checkpoints: dict[str, Path], train: Train
) -> tuple[Steps, dict[str, Steps]]:
    straight = train(rank, size, folder / "straight").local
    resumed = {
        phase: train(rank, size, folder / f"resumed_{i}", ckpt_path=path).local
        for i, (phase, path) in enumerate(checkpoints.items())
    }
    return straight, resumed


def check_ends(run: Run, victim: int) -> None:
    """The others end with an error, within the timeout."""
    assert run.ends[victim].exit_code == -signal.SIGKILL
    for rank, end in enumerate(run.ends):
        if rank != victim:
            assert end.error, f"rank {rank} did not end with an error: {end}"
            # gloo overlooks a death in a hundred; then it is the timeout that ends the wait
            assert end.failed_s - run.died_s < TIMEOUT.total_seconds() + 5.0, (rank, end)


def check_names(run: Run, victim: int) -> None:
    """The others name the rank that died, and no rank that left because of it."""
    for rank, end in enumerate(run.ends):
        if rank != victim:
            assert f"rank {victim} is gone" in end.error, (rank, end.error)
            others = set(range(len(run.ends))) - {rank, victim}
            assert not any(f"rank {other} is" in end.error for other in others), (rank, end.error)
            assert "Restart all ranks from the last checkpoint" in end.error


def check_files(run: Run) -> None:
    """No file is half-written under its final name."""
    files = list((run.folder / "saved").rglob("*"))
    files = [file for file in files if file.suffix in (".ckpt", ".pt") and file.is_file()]
    assert files
    for file in files:
        torch.load(file, weights_only=True)
