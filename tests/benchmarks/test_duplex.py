"""The duplex benchmark: its medians, and a toy run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.duplex import __main__ as duplex
from benchmarks.lab import why_unavailable


def test_a_figure_is_the_median_over_the_rounds() -> None:
    seconds = {
        (3, "one", 1_000_000): [0.3, 0.4, 9.0],
        (3, "two", 1_000_000): [0.1, 0.2, 0.3],
    }
    assert duplex.medians_ms(seconds) == {3: {1_000_000: (400, 200)}}


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.usefixtures("forked_lab")
def test_every_round_of_both_kinds_is_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    few = ["--nodes", "2", "--sizes", "1000", "50000", "--rounds", "3", "--page", str(page)]
    assert duplex.main(few) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| 2 |")]
    assert [row.split("|")[2].strip() for row in rows] == ["0.001", "0.05"]
    assert all(row.endswith("| 3 |") for row in rows)
    assert all(float(row.split("|")[4]) > 0 for row in rows)
