"""A replica dies by SIGKILL at every phase of a cycle.

The others end with an error, no file is left half-written, and the fit goes on from the last
checkpoint as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.resume.files import _Sink
from tests.strategies import dying
from tests.strategies.dying import (
    SAVE_EVERY,
    Clock,
    Run,
    check_ends,
    check_files,
    check_names,
    check_same,
    die,
    die_within,
    last_checkpoint,
    resume_phases,
    run_phases,
)

SIZE = 3
STEPS = 24
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


train = partial(dying.train, settings=SETTINGS, steps=STEPS)


# The phases: each function makes this process kill itself there, at the given inner step


def die_writing(step: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Die when half of a file's bytes are written, by whatever saves."""
    original = _Sink.write

    def mortal(self: _Sink, data: Any) -> int:
        if Clock.step == step:
            original(self, bytes(data)[: len(data) // 2])
            die(folder)
        return original(self, data)

    patch.setattr(_Sink, "write", mortal)


class DieBeforeStep(pl.Callback):
    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step:
            die(self.folder)


Arm = Callable[[Path, pytest.MonkeyPatch], "pl.Callback | None"]
ALGORITHM: dict[str, Arm] = {
    "before the first launch": lambda folder, patch: DieBeforeStep(8, folder),
    "in flight": lambda f, p: die_within(StreamingDiLoCo, "launch", "after", 8, f, p),
    "just before a landing": lambda f, p: die_within(StreamingDiLoCo, "land", "before", 10, f, p),
    "before the outer step": lambda f, p: die_within(
        OuterFragment, "outer_step", "before", 10, f, p
    ),
    "after the outer step": lambda f, p: die_within(OuterFragment, "outer_step", "after", 10, f, p),
    "in `finish`": lambda f, p: die_within(StreamingDiLoCo, "land", "after", 24, f, p),
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


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What became of the ranks, by phase, and when the one died."""
    return run_phases(PHASES, SIZE, train_and_die, tmp_path_factory)


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return resume_phases(killed, SIZE, train, tmp_path_factory)


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_end_within_the_timeout_and_name_the_rank(
    phase: str, killed: dict[str, Run]
) -> None:
    victim = WRITING[phase][0] if phase in WRITING else 1
    check_ends(killed[phase], victim)
    check_names(killed[phase], victim)


@pytest.mark.parametrize("phase", ALGORITHM)
def test_the_others_name_the_exchange(phase: str, killed: dict[str, Run]) -> None:
    for rank in (0, 2):
        assert "The exchange 'outer_gradient' failed" in killed[phase].ends[rank].error


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_is_half_written(phase: str, killed: dict[str, Run]) -> None:
    check_files(killed[phase])


LAST = {"writing the checkpoint": 14, "in `finish`": 21}  # 7 for the others


@pytest.mark.parametrize("phase", PHASES)
def test_going_on_from_the_last_checkpoint_is_exact(
    phase: str, killed: dict[str, Run], resumed: Any
) -> None:
    step = LAST.get(phase, SAVE_EVERY)
    assert last_checkpoint(killed[phase]).name == f"step={step}.ckpt"
    for straight, by_phase in resumed:
        check_same(by_phase[phase], straight, step)


def test_the_ranks_differ_in_the_middle(resumed: Any) -> None:
    """Otherwise a resume that gave every rank the weights of rank 0 would be exact too."""
    (first, _), (second, _), _ = resumed
    assert not torch.equal(first[-2]["head.weight"], second[-2]["head.weight"])
