"""A rank of a Domino fit dies by SIGKILL: the others end with an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_commfree import DominoTPStrategy
from lightning_commfree.domino.schedule import ScheduleRun
from tests.fit.causal_lm import CausalLM, loader
from tests.fit.dying import TIMEOUT, Run, check_ends, check_names, die, run_phases
from tests.fit.models import quiet_trainer

SIZE, GROUP, VICTIM = 4, 2, 3
# Where it dies. Rank 2 shares its model, rank 1 its gradients, rank 0 nothing.
PHASES = ["in forward", "in backward", "before validation"]


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
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """How the ranks ended, by phase, and when the one died."""
    return run_phases(PHASES, SIZE, train_and_die, tmp_path_factory)


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_name_the_rank_within_the_timeout(killed: dict[str, Run], phase: str) -> None:
    check_ends(killed[phase], VICTIM)
    check_names(killed[phase], VICTIM)
