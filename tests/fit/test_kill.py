"""A rank of a DiLoCo fit dies by SIGKILL at every phase of a cycle.

The others end with an error that names it, no file is left half-written, and a resume from the last
checkpoint continues as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.resume.files import _Sink
from lightning_commfree.resume.rank_files import RankFiles
from tests.fit import dying
from tests.fit.dying import (
    Clock,
    Run,
    Train,
    check_ends,
    check_files,
    check_names,
    die,
    die_within,
    last_checkpoint,
    resume_phases,
    run_phases,
)
from tests.fit.models import assert_same

Arm = Callable[[Path, pytest.MonkeyPatch], "pl.Callback | None"]


class DieIn(pl.Callback):
    def __init__(self, hook: str, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder
        setattr(self, hook, self._die)

    def _die(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step:
            die(self.folder)


def within(owner: type, name: str, moment: str, step: int) -> Arm:
    return lambda folder, patch: die_within(owner, name, moment, step, folder, patch)


def in_hook(hook: str, step: int) -> Arm:
    return lambda folder, _: DieIn(hook, step, folder)


def writing(step: int) -> Arm:
    """Die when half of a file's bytes are written, by whatever saves."""

    def arm(folder: Path, patch: pytest.MonkeyPatch) -> None:
        original = _Sink.write

        def mortal(self: _Sink, data: Any) -> int:
            if Clock.step == step:
                original(self, bytes(data)[: len(data) // 2])
                die(folder)
            return original(self, data)

        patch.setattr(_Sink, "write", mortal)

    return arm


class Fits(NamedTuple):
    size: int
    train: Train
    phases: dict[str, tuple[int, int, Arm]]  # the rank that dies, the last checkpoint, and how


HALVES: dict[str, Any] = {"sync_every": 8, "num_fragments": 2}
SGD = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
# A save follows steps 7, 14, 21. Fragment 0 leaves after 8, 16, 24, fragment 1 after 12, 20.
FITS = {
    # They land 2 steps later. Rank 1 dies in steps 8 to 11, so that a landing comes before the next
    # save, in whose collectives, which are Lightning's, the survivors would fail otherwise.
    "gathered": Fits(
        3,
        partial(
            dying.train,
            settings={**HALVES, "overlap_steps": 2, "wire_dtype": "fp4", "outer_optimizer": SGD},
            steps=24,
        ),
        {
            "before the first launch": (1, 7, in_hook("on_train_batch_start", 8)),
            "in flight": (1, 7, within(StreamingDiLoCo, "launch", "after", 8)),
            "after the outer step": (1, 7, within(OuterFragment, "outer_step", "after", 10)),
            "in `finish`": (1, 21, within(StreamingDiLoCo, "land", "after", 24)),
            "writing its own file": (1, 7, writing(14)),
            "writing the checkpoint": (0, 14, writing(21)),
        },
    ),
    # The wide blocks go by shards, in a thread: it fails while the training continues, and the
    # error comes at the landing, after 21. The save after 14 has fragment 1 in flight.
    "by shards": Fits(
        3,
        partial(dying.train, settings={**HALVES, "overlap_steps": 5}, steps=24, width=40),
        {
            "before the all-to-all": (1, 14, within(Channel, "all_to_all", "before", 15)),
            "before the all-gather": (1, 14, within(Channel, "all_gather", "before", 15)),
            "in the all-gather": (1, 14, within(Channel, "all_gather", "after", 15)),
        },
    ),
    # Rank 2 shares a replica with rank 3, which dies, rank 1 an outer exchange, rank 0 nothing.
    "replicas of two": Fits(
        4,
        partial(dying.train, settings={**HALVES, "overlap_steps": 2, "replica_size": 2}, steps=22),
        {
            "in DDP's all-reduce": (3, 14, in_hook("on_before_backward", 17)),
            "in a landing": (3, 14, within(OuterFragment, "outer_step", "after", 15)),
            "before writing its file": (3, 14, within(RankFiles, "write", "before", 15)),
        },
    ),
}
CASES = [(name, phase) for name, fits in FITS.items() for phase in fits.phases]


def train_and_die(name: str, rank: int, size: int, folder: Path, phase: str) -> None:
    victim, _, arm = FITS[name].phases[phase]
    with pytest.MonkeyPatch.context() as patch:
        callback = arm(folder, patch) if rank == victim else None
        FITS[name].train(rank, size, folder / "saved", Clock(), *([callback] if callback else []))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Run]]:
    """How the ranks of each phase ended, and when the one died."""
    return {
        name: run_phases(fits.phases, fits.size, partial(train_and_die, name), tmp_path_factory)
        for name, fits in FITS.items()
    }


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        name: resume_phases(killed[name], fits.size, fits.train, tmp_path_factory)
        for name, fits in FITS.items()
    }


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_the_others_name_the_rank_and_leave_whole_files(
    name: str, phase: str, killed: dict[str, Any]
) -> None:
    run, (victim, *_) = killed[name][phase], FITS[name].phases[phase]
    check_ends(run, victim)
    check_names(run, victim)
    check_files(run)
    gathered = name == "gathered" and "writing" not in phase
    # in the all-gather the others got all and continued, to Lightning's collectives
    if gathered or (name == "by shards" and "before" in phase):
        for rank in (0, 2):
            assert "The exchange 'outer_gradient' failed" in run.ends[rank].error


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_a_resume_from_the_last_checkpoint_is_exact(
    name: str, phase: str, killed: dict[str, Any], resumed: dict[str, Any]
) -> None:
    _, step, _ = FITS[name].phases[phase]
    assert last_checkpoint(killed[name][phase]).name == f"step={step}.ckpt"
    for straight, by_phase in resumed[name]:
        assert_same(by_phase[phase], straight[step:])
    # otherwise a resume that gave every rank the weights of rank 0 would be exact too
    first, other = resumed[name][0][0][-4], resumed[name][2][0][-4]
    assert not torch.equal(first["head.weight"], other["head.weight"])
