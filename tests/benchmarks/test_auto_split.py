"""The auto-split benchmark: its arithmetic, and a toy run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.auto_split import __main__ as auto_split
from benchmarks.lab import why_unavailable

PASSES = {"none": [3.0, 30.0, 1.0], "batch": [2.0, 20.0, 1.0], "token": [2.1, 21.0, 2.0]}


def test_a_choice_other_than_the_best_has_a_ratio() -> None:
    cell = auto_split.Cell("token", 57, PASSES, {"auto": [2.2, 22, 1.0], "batch": [2.0, 20, 2.0]})
    assert (cell.best, cell.ms["none"]) == ("batch", 3000)
    assert cell.ratio == pytest.approx(1.1), "a slow round affects both"
    said = " ".join(auto_split.opening({("1gbit", 4): cell}))
    assert "in 0 of 1 cells (missed); at worst 1.100 (4 x 128 tokens at 1gbit)" in said
    assert "in 0 of 1 cells, after 57 to 57 passes" in said
    assert auto_split.page_lines({("1gbit", 4): cell})[-1].endswith(" | 3 |")


def test_the_interval_contains_the_median_in_19_of_20_cases() -> None:
    noise, held = random.Random(0), 0
    for _ in range(400):
        ratios = [noise.lognormvariate(0, 0.2) for _ in range(100)]
        pair = {"auto": ratios, "batch": [1.0] * 100}
        middle, low, high = auto_split.Cell("token", 30, PASSES, pair).ratio_interval
        assert low < middle < high
        held += low <= 1 <= high
    assert 0.93 <= held / 400 <= 0.99


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.usefixtures("forked_lab")
def test_a_toy_run_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    few = ["--rates", "1gbit", "--rows", "1", "--most-rounds", "1", "--page", str(page)]
    assert auto_split.main(few) == 0
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| 1gbit | 1 |"))
    assert row.split(" | ")[5] == "1", "rounds"
