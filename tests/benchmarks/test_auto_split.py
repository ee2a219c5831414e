"""The bench of Domino's own choice: its arithmetic, and a true run at toy size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.auto_split import __main__ as auto_split
from benchmarks.lab import why_unavailable

TIMES = {"none": 3.0, "batch": 2.0, "token": 2.1, "auto": 2.05}


def node(slower: float) -> list[tuple[int, str, float | str]]:
    lines: list[tuple[int, str, float | str]] = [(4, "chosen", "token"), (4, "trial", 57)]
    for name, seconds in TIMES.items():
        lines += [(4, name, seconds * slower), (4, name, seconds), (4, name, seconds / 2)]
    return lines


def test_the_slower_node_counts_and_the_best_fixed_split() -> None:
    cells = auto_split.cells_of([node(1.0), node(1.5)])
    assert cells[4].ms["none"] == 3000
    assert (cells[4].best, cells[4].chosen, cells[4].rounds) == ("batch", "token", 3)
    assert cells[4].ratio == pytest.approx(1.05)
    assert cells[4].beside("auto", "token")[0] == pytest.approx(2.05 / 2.1)
    said = " ".join(auto_split.opening({("1gbit", 4): cells[4]}))
    assert "in 0 of 1 cells (missed); at worst 1.050 (4 x 128 tokens at 1gbit)" in said
    assert "chosen in 0 of 1, after 57 to 57 passes" in said


def test_rounds_are_compared_one_by_one() -> None:
    """A machine that slows down in mid-run slows both."""
    passes = {"none": [1.0, 10.0, 10.0], "batch": [1.1, 11.0, 10.0], "token": [3.0, 30.0, 30.0]}
    cell = auto_split.Cell({**passes, "auto": passes["batch"]}, "batch", 30)
    assert cell.best == "none"
    assert cell.ratio == pytest.approx(1.1)


def test_an_interval_holds_the_median_in_19_of_20_cases() -> None:
    noise, held = random.Random(0), 0
    for _ in range(400):
        ratios = [noise.lognormvariate(0, 0.2) for _ in range(100)]
        passes = {"none": [1.0] * 100, "batch": ratios}
        middle, low, high = auto_split.Cell(passes, "batch", 30).beside("batch", "none")
        assert low < middle < high
        held += low <= 1 <= high
    assert 0.93 <= held / 400 <= 0.99


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_toy_run_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    few = ["--rates", "1gbit", "--rows", "1", "--most-rounds", "1", "--page", str(page)]
    assert auto_split.main(few) == 0
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| 1gbit | 1 |"))
    assert row.endswith(" | 1 |")


def test_without_a_laboratory_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.lab.netlab.why_unavailable", lambda: "It needs root.")
    assert auto_split.main(["--page", str(tmp_path / "page")]) == 2
    assert capsys.readouterr().err == "It needs root.\n"
    assert not (tmp_path / "page").exists()
