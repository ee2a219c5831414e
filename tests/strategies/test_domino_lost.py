"""A rank of a Domino fit dies by SIGKILL: the others end with an error that names it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_commfree import DominoTPStrategy
from lightning_commfree.domino.schedule import ScheduleRun
from tests.mortal import End, run_mortals
from tests.strategies.causal_lm import CausalLM, loader
from tests.strategies.models import quiet_trainer

SIZE, GROUP, VICTIM = 4, 2, 3
TIMEOUT = timedelta(seconds=20)
# Where it dies. Rank 2 shares its model, rank 1 its gradients, rank 0 nothing.
PHASES = ["in forward", "in backward", "before validation"]


def die(folder: Path) -> None:
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


class DieBeforeValidation(pl.Callback):
    """The others come to Lightning's own barriers and reductions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_start(self, *_: Any) -> None:
        die(self.folder)


def train_and_die(rank: int, size: int, folder: Path, phase: str) -> None:
    trainer = quiet_trainer(
        strategy=DominoTPStrategy(GROUP, timeout=TIMEOUT),
        devices=size,
        max_steps=6,
        val_check_interval=3,
        num_sanity_val_steps=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM and phase == "before validation":
            trainer.callbacks.append(DieBeforeValidation(folder))
        elif rank == VICTIM:
            name = phase.removeprefix("in ")
            played = getattr(ScheduleRun, name)

            def mortal(play: Any, *args: Any) -> Any:
                result = played(play, *args)
                if trainer.global_step == 2:
                    die(folder)
                return result

            patch.setattr(ScheduleRun, name, mortal)
        trainer.fit(CausalLM(), loader(48, 2), loader(8, 2))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[End], float]]:
    """How the ranks ended, by phase, and when the one died."""
    runs = {}
    for phase in PHASES:
        folder = tmp_path_factory.mktemp("phase")
        ends = run_mortals(train_and_die, SIZE, folder, folder, phase, timeout=TIMEOUT)
        runs[phase] = ends, float((folder / "died").read_text())
    return runs


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_name_the_rank_within_the_timeout(
    killed: dict[str, tuple[list[End], float]], phase: str
) -> None:
    ends, died = killed[phase]
    assert ends[VICTIM].exit_code == -signal.SIGKILL
    for rank, end in enumerate(ends):
        if rank != VICTIM:
            assert f"rank {VICTIM} is gone" in end.error, (rank, end.error)
            others = [r for r in range(SIZE) if r not in (rank, VICTIM)]
            assert not any(f"rank {other} is" in end.error for other in others), "they left for it"
            assert "Restart all ranks from the last checkpoint" in end.error
            # gloo overlooks a death in a hundred; then it is the timeout that ends the wait
            assert end.failed_s - died < TIMEOUT.total_seconds() + 5.0
