"""What ranks are told of each other where a common training ends, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes
from lightning_commfree.comm.meeting import Stage
from lightning_commfree.comm.parting import TAG, Part, Parted, Why, part
from tests.world import run_ranks

SIZE = 3
STEP, END = Stage.STEP, Stage.EPOCH_END

# parts by rank, and what all find
CASES: dict[str, tuple[tuple[Part, Part, Part], Parted]] = {
    "one ends": (
        (
            Part(Why.GOES_ON, 7, STEP, False),
            Part(Why.DATA, 5, END, False),
            Part(Why.GOES_ON, 7, STEP, False),
        ),
        Parted(
            "The data of rank 1 ended after step 5, and ranks 0, 2 would have gone on", False, END
        ),
    ),
    "all end alike, each by something else": (
        (
            Part(Why.DATA, 5, STEP, False),
            Part(Why.MAX_STEPS, 5, STEP, False),
            Part(Why.WILL, 5, STEP, False),
        ),
        Parted("", False, STEP),
    ),
    "after different steps": (
        (
            Part(Why.WILL, 6, STEP, False),
            Part(Why.DATA, 5, STEP, False),
            Part(Why.WILL, 6, STEP, False),
        ),
        Parted(
            "The data of rank 1 ended after step 5; ranks 0, 2 wanted to stop"
            " (`trainer.should_stop`) after step 6",
            False,
            STEP,
        ),
    ),
    "one that waits refuses": (
        (
            Part(Why.APART, 4, END, True),
            Part(Why.MAX_STEPS, 4, STEP, False),
            Part(Why.GOES_ON, 4, STEP, False),
        ),
        Parted(
            "rank 1 reached `max_steps` after step 4; rank 0 waited at the end of an epoch, a"
            " validation or a checkpoint after step 4, and rank 2 would have gone on",
            True,
            END,
        ),
    ),
}


def play(rank: int, size: int) -> Any:
    ledger = Ledger()
    channel = Channel.open([list(range(size))], rank, ledger)
    found = {name: part(channel, parts[rank]) for name, (parts, _) in CASES.items()}
    channel.close()
    return found, ledger.bytes_by_tag[TAG]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(play, SIZE, tmp_path_factory.mktemp("parting"))


@pytest.mark.parametrize("case", CASES)
def test_all_find_the_same(played: list[Any], case: str) -> None:
    for found, _ in played:
        assert found[case] == CASES[case][1]


def test_four_numbers_travel(played: list[Any]) -> None:
    for _, sent in played:
        assert sent == len(CASES) * all_gather_bytes(4 * 8, SIZE)
