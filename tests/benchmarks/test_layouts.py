"""The layouts benchmark: a true run at toy size, and the committed page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.bandwidth.measure import Results
from benchmarks.layouts import __main__ as layouts
from benchmarks.layouts import memory
from tests.world import run_ranks

TOY_MODEL = {"layers": 2, "width": 32}


def memory_rows(rank: int, size: int, rows: list[str], folder: Path) -> Any:
    return memory.every_row({"ranks": size, "rows": rows, **TOY_MODEL}, folder)


def test_two_fsdp_ranks_hold_half_of_a_single_rank(tmp_path: Path) -> None:
    (alone,) = run_ranks(memory_rows, 1, tmp_path, ["ddp"], tmp_path)
    two = run_ranks(memory_rows, 2, tmp_path, ["ddp", "fsdp", "fsdp meta"], tmp_path)
    results = Results(tmp_path / "memory.json", {})
    results.add(memory.COUNTS, 1, alone)
    for row in range(2):
        results.add(memory.COUNTS, 2, [rank[row] for rank in two])
    found = memory.found(results.raw["records"], memory.COUNTS)
    ratios = memory.shares(found)
    assert ratios[2, "fsdp"] == pytest.approx(1, abs=memory.WITHIN)
    assert ratios[2, "ddp"] > 1.6, "DDP shards only the outer state"
    (model, *_) = {rank[2]["model"] for rank in two}
    assert found[1, "ddp"][0]["parameters"] == model == found[1, "ddp"][0]["gradients"]
    assert all(rank[2]["largest_unit"] < model for rank in two)


def test_the_committed_page_matches_its_results(tmp_path: Path) -> None:
    saved = layouts.PAGE.with_name("memory.json")
    layouts.write(Results(saved, memory.SETTINGS), tmp_path / "result.md")
    assert (tmp_path / "result.md").read_text() == layouts.PAGE.read_text()
