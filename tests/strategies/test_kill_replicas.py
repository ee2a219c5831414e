"""A rank of a replica of two dies by SIGKILL: its partner, in DDP's all-reduce or in the replica's
own exchanges, and the ranks of the other replica end with an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.resume.rank_files import RankFiles
from tests.strategies import dying
from tests.strategies.dying import (
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

# Rank 2 shares a replica with it, rank 1 an outer exchange, rank 0 nothing.
SIZE, REPLICA, VICTIM = 4, 2, 3
# Fragment 0 leaves after 8 and 16, fragment 1 after 12 and 20; they land 2 steps later.
SETTINGS: dict[str, Any] = {
    "sync_every": 8,
    "num_fragments": 2,
    "overlap_steps": 2,
    "replica_size": REPLICA,
}
LAST = 14
train = partial(dying.train, settings=SETTINGS, steps=22)


class DieInBackward(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == 17:
            die(self.folder)


Arm = Callable[[Path, pytest.MonkeyPatch], "pl.Callback | None"]
PHASES: dict[str, Arm] = {
    "in DDP's all-reduce": lambda folder, patch: DieInBackward(folder),
    "before a launch": lambda f, p: die_within(StreamingDiLoCo, "launch", "before", 15, f, p),
    "in a landing": lambda f, p: die_within(OuterFragment, "outer_step", "after", 15, f, p),
    "before writing its file": lambda f, p: die_within(RankFiles, "write", "before", 15, f, p),
}


def train_and_die(rank: int, size: int, folder: Path, phase: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dying = PHASES[phase](folder, patch) if rank == VICTIM else None
        train(rank, size, folder / "saved", Clock(), *([dying] if dying else []))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_phases(PHASES, SIZE, train_and_die, tmp_path_factory)


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return resume_phases(killed, SIZE, train, tmp_path_factory)


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_name_the_rank_and_leave_whole_files(phase: str, killed: dict[str, Run]) -> None:
    check_ends(killed[phase], VICTIM)
    check_names(killed[phase], VICTIM)
    check_files(killed[phase])


@pytest.mark.parametrize("phase", PHASES)
def test_going_on_from_the_last_checkpoint_is_exact(
    phase: str, killed: dict[str, Run], resumed: Any
) -> None:
    assert last_checkpoint(killed[phase]).name == f"step={LAST}.ckpt"
    for straight, by_phase in resumed:
        check_same(by_phase[phase], straight, LAST)
    first, third = resumed[0][0], resumed[2][0]
    assert (first[-4]["head.weight"] != third[-4]["head.weight"]).any(), "the replicas differ"
