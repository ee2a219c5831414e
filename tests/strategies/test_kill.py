"""A replica dies by SIGKILL at every phase of a cycle.

The others end with an error, no file is left half-written, and the fit goes on from the last
checkpoint as if nothing had happened.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from tests.mortal import End, run_mortals
from tests.strategies.models import Recorder, Tiny, quiet_trainer, rank_loader
from tests.world import run_ranks

SIZE = 3
STEPS = 24
SAVE_EVERY = 7
TIMEOUT = timedelta(seconds=20)
# Launches after 8, 16, 24 (fragment 0) and 12, 20 (fragment 1), landings 2 steps later, saves after
# 7, 14, 21: whoever dies in steps 8 to 11, a landing comes before the next save, in whose
# collectives, which are Lightning's, the survivors would fail otherwise.
SETTINGS: dict[str, Any] = {
    "sync_every": 8,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp4",
    "outer_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}


def train(rank: int, size: int, folder: Path, *callbacks: pl.Callback, **fit: Any) -> Recorder:
    recorder = Recorder()
    save = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=SAVE_EVERY, save_last=False
    )
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(timeout=TIMEOUT, **SETTINGS),
        devices=size,
        enable_checkpointing=True,
        callbacks=[recorder, *callbacks, save],
        max_steps=STEPS,
        use_distributed_sampler=False,
    )
    trainer.fit(Tiny(), rank_loader(2 * STEPS * size, 2, rank, size), **fit)
    return recorder


# The phases: each function makes this process kill itself there, at the given inner step


def die(folder: Path) -> None:
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(
    owner: type, name: str, moment: str, step: int, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """Die before or after a method of the algorithm; its step counter is read from the class."""
    original = getattr(owner, name)

    def mortal(self: Any, *args: Any, **kwargs: Any) -> Any:
        due = Clock.step == step
        if due and moment == "before":
            die(folder)
        result = original(self, *args, **kwargs)
        if due and moment == "after":
            die(folder)
        return result

    patch.setattr(owner, name, mortal)


def die_writing(step: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Die when half of a file's bytes are written, by whatever saves."""
    original = LocalFileOpener.write

    def mortal(self: Any, data: Any) -> Any:
        if Clock.step == step:
            original(self, bytes(data)[: len(data) // 2])
            self.f.flush()
            die(folder)
        return original(self, data)

    patch.setattr(LocalFileOpener, "write", mortal)


class Clock(pl.Callback):
    """Knows the inner step that is running or has just run, in this process."""

    step = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        Clock.step = trainer.global_step + 1


class DieBeforeStep(pl.Callback):
    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step:
            die(self.folder)


Arm = Callable[[Path, pytest.MonkeyPatch], "pl.Callback | None"]
ALGORITHM: dict[str, Arm] = {
    "before the first launch": lambda folder, patch: DieBeforeStep(8, folder),
    "in flight": lambda f, p: die_within(StreamingDiLoCo, "_launch", "after", 8, f, p),
    "just before a landing": lambda f, p: die_within(StreamingDiLoCo, "_land", "before", 10, f, p),
    "before the outer step": lambda f, p: die_within(
        OuterFragment, "outer_step", "before", 10, f, p
    ),
    "after the outer step": lambda f, p: die_within(OuterFragment, "outer_step", "after", 10, f, p),
    "in `finish`": lambda f, p: die_within(StreamingDiLoCo, "_land", "after", 24, f, p),
}
WRITING: dict[str, tuple[int, int]] = {  # the rank that dies, at the save after which step
    "writing its own file": (1, 14),
    "writing the checkpoint": (0, 21),
}
PHASES = [*ALGORITHM, *WRITING]


def train_and_die(rank: int, size: int, folder: Path, phase: str) -> None:
    callbacks: list[pl.Callback] = [Clock()]
    with pytest.MonkeyPatch.context() as patch:
        if phase in WRITING and rank == WRITING[phase][0]:
            die_writing(WRITING[phase][1], folder, patch)
        elif phase in ALGORITHM and rank == 1:
            dying = ALGORITHM[phase](folder, patch)
            callbacks += [dying] if dying else []
        train(rank, size, folder / "saved", *callbacks)


Run = tuple[Path, list[End], float]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What became of the ranks, by phase, and when the one died."""
    runs = {}
    for phase in PHASES:
        folder = tmp_path_factory.mktemp("phase")
        ends = run_mortals(train_and_die, SIZE, folder, folder, phase, timeout=TIMEOUT)
        runs[phase] = folder, ends, float((folder / "died").read_text())
    return runs


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "saved").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))


def resume_all(rank: int, size: int, folder: Path, checkpoints: dict[str, Path]) -> Any:
    straight = train(rank, size, folder / "straight")
    resumed = {
        phase: train(rank, size, folder / f"resumed_{i}", ckpt_path=path)
        for i, (phase, path) in enumerate(checkpoints.items())
    }
    return straight.local, {phase: recorder.local for phase, recorder in resumed.items()}


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted run and one resumed from every phase's last checkpoint, rank by rank."""
    folder = tmp_path_factory.mktemp("resumed")
    checkpoints = {phase: last_checkpoint(run[0]) for phase, run in killed.items()}
    return run_ranks(resume_all, SIZE, folder, folder, checkpoints)


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_end_within_the_timeout(phase: str, killed: dict[str, Run]) -> None:
    _, ends, died = killed[phase]
    victim = WRITING[phase][0] if phase in WRITING else 1
    assert ends[victim].exit_code == -signal.SIGKILL
    for rank, end in enumerate(ends):
        if rank != victim:
            assert end.error, f"rank {rank} did not end with an error: {end}"
            assert end.failed_s - died < TIMEOUT.total_seconds()


@pytest.mark.parametrize("phase", ALGORITHM)
def test_the_others_name_the_rank(phase: str, killed: dict[str, Run]) -> None:
    _, ends, _ = killed[phase]
    for rank in (0, 2):
        assert "rank 1 is gone" in ends[rank].error
        assert f"rank {2 - rank} is" not in ends[rank].error, "it left because of rank 1"
        assert "The exchange 'outer_gradient' failed" in ends[rank].error
        assert "Restart all ranks from the last checkpoint" in ends[rank].error


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_is_half_written(phase: str, killed: dict[str, Run]) -> None:
    files = list((killed[phase][0] / "saved").rglob("*"))
    files = [file for file in files if file.suffix in (".ckpt", ".pt") and file.is_file()]
    assert files
    for file in files:
        torch.load(file, weights_only=True)


LAST = {"writing the checkpoint": 14, "in `finish`": 21}  # 7 for the others


@pytest.mark.parametrize("phase", PHASES)
def test_going_on_from_the_last_checkpoint_is_exact(
    phase: str, killed: dict[str, Run], resumed: Any
) -> None:
    step = LAST.get(phase, SAVE_EVERY)
    assert last_checkpoint(killed[phase][0]).name == f"step={step}.ckpt"
    for rank, (straight, by_phase) in enumerate(resumed):
        later: list[dict[str, Tensor]] = by_phase[phase]
        assert len(later) == STEPS - step
        for got, expected in zip(later, straight[step:], strict=True):
            for name, tensor in expected.items():
                assert torch.equal(got[name], tensor), f"{name} on rank {rank}"


def test_the_ranks_differ_in_the_middle(resumed: Any) -> None:
    """Otherwise a resume that gave every rank the weights of rank 0 would be exact too."""
    (first, _), (second, _), _ = resumed
    assert not torch.equal(first[-2]["head.weight"], second[-2]["head.weight"])
