"""The planner compared with the paper's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner import __main__ as planner
from benchmarks.planner.cells import (
    cells_of_table_4,
)


@pytest.fixture(scope="module")
def cells():
    return list(cells_of_table_4())


def test_all_75_cells_are_within_one_step_of_the_grid(cells) -> None:
    assert len({(c.method, c.size, c.target) for c in cells}) == len(cells) == 75
    assert max(abs(cell.ours - cell.paper) for cell in cells) <= 1
    assert sum(cell.ours == cell.paper for cell in cells) >= 55


def test_the_committed_page_is_what_the_command_writes(tmp_path: Path) -> None:
    page = tmp_path / "result.md"
    planner.main(["--page", str(page)])
    ours, committed = (path.read_text().split("## All cells") for path in (page, planner.PAGE))
    assert ours[1] == committed[1]
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
