"""The benchmark of a resume's position: a toy run, and the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.resume_position.__main__ import page_of
from benchmarks.resume_position.job import measure
from tests.world import run_ranks


def play(rank: int, size: int, folder: Path) -> dict[int, list[float]]:
    return measure(size, [2, 6], 2, 1e-4, folder)


def test_every_round_is_measured(tmp_path: Path) -> None:
    for found in run_ranks(play, 2, tmp_path, tmp_path):
        assert [len(values) for values in found.values()] == [2, 2]
        assert all(value > 0 for values in found.values() for value in values)


@pytest.mark.parametrize(("late", "verdict"), [(1.5, "met"), (3.5, "missed")])
def test_the_verdict_follows_the_criterion(late: float, verdict: str) -> None:
    page = "\n".join(page_of({20: [1.0, 1.2, 9.0], 20_000: [late] * 3}, 1e-3, ["- command: `c`"]))
    assert f"{late - 1.2:+.2f} s after the one at batch 20" in page
    assert f"(bound: +1 s): {verdict}." in page
    assert "| 20 | 1.20 | 1.00 | 1.20 | 9.00 |" in page
