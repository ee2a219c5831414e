"""A replica dies by SIGKILL at every phase of an exchange by shards, which a thread plays.

The thread fails while the training goes on; the error comes at the landing. `test_kill` does the
same with fragments that are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco.exchange import FragmentMessage
from tests.strategies import dying
from tests.strategies.dying import (
    Clock,
    Run,
    check_ends,
    check_files,
    check_names,
    check_same,
    die_within,
    last_checkpoint,
    resume_phases,
    run_phases,
)

SIZE, VICTIM = 3, 1
WIDTH = 40  # the blocks go by shards; input and output layer are gathered
# Fragment 0 (the blocks) leaves after 8, 16, 24 and lands 5 steps later, fragment 1 after 12 and
# 20, while fragment 0 is in flight. The deaths come with the exchange that leaves after 16, and the
# others learn of them at its landing, after 21. The save after 14 has fragment 1 in flight.
SETTINGS: dict[str, Any] = {"sync_every": 8, "num_fragments": 2, "overlap_steps": 5}
LAST = 14
train = partial(dying.train, settings=SETTINGS, steps=24, width=WIDTH)
Arm = Callable[[Path, pytest.MonkeyPatch], None]
PHASES: dict[str, Arm] = {
    "before the all-to-all": partial(die_within, Channel, "all_to_all", "before", 15),
    "before the all-gather": partial(die_within, Channel, "all_gather", "before", 15),
    "in the all-gather": partial(die_within, Channel, "all_gather", "after", 15),
    "after it": partial(die_within, FragmentMessage, "values", "before", 15),
}


def train_and_die(rank: int, size: int, folder: Path, phase: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM:
            PHASES[phase](folder, patch)
        train(rank, size, folder / "saved", Clock())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_phases(PHASES, SIZE, train_and_die, tmp_path_factory)


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return resume_phases(killed, SIZE, train, tmp_path_factory)


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_name_the_rank_and_leave_whole_files(phase: str, killed: dict[str, Run]) -> None:
    run = killed[phase]
    check_ends(run, VICTIM)
    check_names(run, VICTIM)
    if "before" in phase:  # else the others got all and went on, to Lightning's collectives
        assert all("'outer_gradient' failed" in run.ends[rank].error for rank in (0, 2))
    check_files(run)


@pytest.mark.parametrize("phase", PHASES)
def test_going_on_from_the_last_checkpoint_is_exact(
    phase: str, killed: dict[str, Run], resumed: Any
) -> None:
    assert last_checkpoint(killed[phase]).name == f"step={LAST}.ckpt"
    for straight, by_phase in resumed:
        check_same(by_phase[phase], straight, LAST)
