"""The planner beside the paper's tables: the data are whole, and the page says what is computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.planner import __main__ as planner
from benchmarks.planner.cells import (
    GRID,
    PAPER,
    VARIATIONS,
    cells_by_sync_every,
    cells_of_table_4,
    paper_exchange,
    paper_model,
)
from benchmarks.planner.tables import DILOCO_BY_SYNC_EVERY, SIZES, TABLE_4, TARGETS
from commfree_planner import utilization


@pytest.fixture(scope="module")
def cells():
    return list(cells_of_table_4())


def test_the_table_is_whole() -> None:
    assert len(TABLE_4) == 5
    for rows in [*TABLE_4.values(), DILOCO_BY_SYNC_EVERY]:
        for row in rows.values():
            assert len(row) == len(TARGETS)
            assert list(row) == sorted(row), "more utilization needs more bandwidth"
    assert all(set(rows) == set(SIZES) for rows in TABLE_4.values())
    for size in SIZES:
        for better, worse in pairwise([rows[size] for rows in reversed(TABLE_4.values())]):
            assert all(b <= w for b, w in zip(better, worse, strict=True))


def test_every_printed_value_lies_on_the_grid() -> None:
    tables = [*(row for rows in TABLE_4.values() for row in rows.values())]
    printed = {value for row in [*tables, *DILOCO_BY_SYNC_EVERY.values()] for value in row}
    offsets = [min(abs(point - value) for point in GRID) for value in printed]
    assert max(offsets) < 0.06
    # values that were not made on a grid of this ratio would not lie that near to its points
    missed = [min(abs(point * 1.1 - value) for point in GRID) for value in printed if value > 2]
    assert min(missed) > 0.06


def test_all_75_cells_lie_within_one_step_of_the_grid(cells) -> None:
    assert len({(c.method, c.size, c.target) for c in cells}) == len(cells) == 75
    assert max(abs(cell.ours - cell.paper) for cell in cells) <= 1
    assert sum(cell.ours == cell.paper for cell in cells) >= 55


def test_a_cell_is_the_last_grid_point_below_the_target(cells) -> None:
    for cell in cells[::7]:
        size = SIZES[cell.size]
        seconds = paper_model(size, PAPER).layer_seconds(size.step_seconds)
        exchange = paper_exchange(cell.method, size, PAPER)
        below, above = (utilization(seconds, exchange, GRID[cell.ours + i]) for i in (0, 1))
        assert below < cell.target <= above
        assert (cell.miss == 0) == (cell.ours == cell.paper)


def test_other_choices_fit_worse_so_the_fit_says_something(cells) -> None:
    exact = sum(cell.ours == cell.paper for cell in cells)
    worse = {"reading": "reaching", "outer_dtype": "fp32", "num_replicas": 4, "by_layer": False}
    for name, value in worse.items():
        others = list(cells_of_table_4(replace(PAPER, **{name: value})))
        assert sum(cell.ours == cell.paper for cell in others) < exact / 2 + 1, name


def test_a_table_that_the_choices_were_not_made_for() -> None:
    others = list(cells_by_sync_every())
    assert len(others) == 20
    assert max(abs(cell.ours - cell.paper) for cell in others) <= 1


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells) -> None:
    monkeypatch.setattr(planner, "VARIATIONS", {"as chosen": PAPER})
    page = tmp_path / "planner.md"
    planner.main(["--page", str(page)])
    text = page.read_text()
    assert "- command: `python -m benchmarks.planner`" in text
    assert all(line in text for line in planner.table_of_cells(cells))
    assert f"| as chosen | {planner.summary(cells)} |" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_page_in_the_repository_is_what_the_command_writes_today(cells) -> None:
    text = planner.PAGE.read_text()
    assert all(line in text for line in planner.table_of_cells(cells))
    assert f"| as chosen | {planner.summary(cells)} |" in text
    assert all(f"| {name} |" in text for name in VARIATIONS)
