"""Where the streams of ranks end: together, apart, or on a rank that leaves."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_commfree.comm.stream_ends import PERIOD_S, StreamEnds, StreamEndsError
from tests.mortal import run_mortals

SIZE = 3


def train(
    rank: int, size: int, steps: tuple[int, ...], leaves: int | None, timeout_s: float
) -> list[str]:
    """Train two epochs of so many steps; return what is raised."""
    ends = StreamEnds(rank, size, "a fit", timedelta(seconds=timeout_s))
    said, done = [], 0
    try:
        for epoch in (0, 1):
            for _ in range(steps[rank]):
                done += 1
                ends.advance(epoch, done)
                if leaves == rank:
                    return ["left"]
            ends.end(epoch, done)
            ends.end(epoch, done)  # a second time it returns at once
    except RuntimeError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        ends.close()
    if rank == 0:
        time.sleep(1.0)  # the store is in its process
    return said


def play(folder: Path, *args: object) -> list[list[str]]:
    ended = run_mortals(train, SIZE, folder, *args)
    assert not any(end.error for end in ended), [end.error for end in ended]
    return [end.result for end in ended]


def test_streams_of_equal_length_end_well(tmp_path: Path) -> None:
    assert play(tmp_path, (3, 3, 3), None, 20.0) == [[], [], []]


@pytest.mark.parametrize("steps", [(5, 3, 5), (3, 5, 5), (5, 4, 3)])
def test_streams_of_unequal_length_are_one_error(tmp_path: Path, steps: tuple[int, ...]) -> None:
    start = time.monotonic()
    found = play(tmp_path, steps, None, 60.0)
    assert found[0] == found[1] == found[2]
    ((text,), *_) = found
    assert text.startswith("StreamEndsError: The data of rank ")
    assert re.search(r"ended after step [34], and rank \d has trained on to step [45]\.", text)
    assert time.monotonic() - start < 15


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    assert play(tmp_path, (3, 3, 3), 1, 20.0) == [[], ["left"], []]


def stay(rank: int, size: int) -> str:
    ends = StreamEnds(rank, size, "a fit", timedelta(seconds=2))
    try:
        ends.advance(0, 1)
        if rank:
            time.sleep(4)
        else:
            ends.end(0, 1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ends.close()
    return ""


def test_a_slow_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    ends = run_mortals(stay, 2, tmp_path)
    assert ends[0].result.startswith("RuntimeError: The data of rank 0 ended after step 1 of")
    assert "ranks [1] have not come to the end of theirs within 2 s" in ends[0].result
    assert ends[1].result == ""


def fail(rank: int, size: int) -> str:
    """Rank 0's stream ends; what fails on rank 1 is explained by it."""
    ends = StreamEnds(rank, size, "a fit", timedelta(seconds=20))
    try:
        ends.advance(0, 1 + rank)
        if rank == 0:
            ends.end(0, 1)
        time.sleep(2 * PERIOD_S)
        with ends.explaining():
            raise RuntimeError("connection closed by peer")
    except StreamEndsError as error:
        return str(error)
    finally:
        ends.close()
    return "unexplained"


def test_the_error_takes_the_place_of_one_that_follows_from_it(tmp_path: Path) -> None:
    first, second = (end.result for end in run_mortals(fail, 2, tmp_path))
    assert first == second
    assert first.startswith("The data of rank 0 ended after step 1, and rank 1 has trained on to")
