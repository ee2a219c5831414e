"""The grid: its model, its predictions and their verdicts. The runs themselves are not repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.grid import __main__ as grid
from benchmarks.grid import job
from benchmarks.grid.cells import (
    BASELINES,
    BLOCK_PARAMETERS,
    BLOCKS,
    FAST,
    OTHER_PARAMETERS,
    SYNC_EVERY,
    TENSORS,
    UNSHAPED,
    WIDE,
)
from benchmarks.grid.page import HIT, MISS, OPEN, Outcome, opening, outcomes, utilization
from benchmarks.grid.predict import MODEL, predicted, sync_seconds
from lightning_commfree.diloco import split_into_fragments

INPUTS = {
    "step_s": {"none": 0.027, "loop": 0.0265},
    "sync_s": {"ours": 0.2, "diloco": 0.8, "torchft": 0.9},
    "mbit": {"unshaped": 4000.0} | {cell.name: 0.95 * (cell.mbit or 0) for cell in (*FAST, *WIDE)},
}


def test_the_planner_gets_the_model_that_runs() -> None:
    module = job.Waiting()
    numels = [p.numel() for p in module.parameters()]
    assert len(numels) == TENSORS
    assert sum(numels) == BLOCKS * BLOCK_PARAMETERS + OTHER_PARAMETERS == 30_846_720
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    fragments = split_into_fragments(module, None, "strided")
    assert [sum(sizes[name] for name in f.parameters) for f in fragments] == [
        sum(map(MODEL.layer_params, layers))
        for layers in MODEL.fragments(MODEL.default_num_fragments)
    ]


@pytest.mark.parametrize("row", BASELINES)
def test_the_work_of_a_sync_is_what_an_unshaped_cycle_has_left(row) -> None:
    step_s = INPUTS["step_s"][BASELINES[row]]
    reached = predicted(row, UNSHAPED, INPUTS)
    found = sync_seconds(row, UNSHAPED, SYNC_EVERY * step_s / reached, step_s, 4000.0)
    assert found == pytest.approx(INPUTS["sync_s"][row])


def test_utilization_is_the_loop_s_time_over_the_row_s() -> None:
    def nodes(row, *seconds):
        return [{"row": row, "cycles": 2, "seconds": one} for one in seconds]

    rows = {"none": nodes("none", 6.0, 8.0), "ours": nodes("ours", 10.0, 10.0)}
    assert utilization(rows, "ours") == pytest.approx(0.7)
    assert utilization(rows, "torchft") is None


def test_a_prediction_within_three_points_is_a_hit() -> None:
    def outcome(measured):
        return Outcome(FAST[0], "diloco", 0.10, measured)

    assert [outcome(m).verdict for m in (0.129, 0.071, 0.131, None)] == [HIT, HIT, MISS, OPEN]
    text = " ".join(opening([outcome(0.129), outcome(0.2), outcome(None)], "picture.png"))
    assert "1 of 2 cells are within 3 points" in text
    assert "Not measured: 1." in text
    assert "they disagree (largest difference 8.5 points)" in text, "11.55 % published"
    assert "predictions only" in " ".join(opening([outcome(None)], "picture.png"))


def test_the_committed_page_is_what_the_command_writes(tmp_path: Path) -> None:
    for name in ("predictions.json", "result.json"):
        if (grid.HERE / name).exists():
            (tmp_path / name).write_text((grid.HERE / name).read_text())
    assert grid.main(["page", "--folder", str(tmp_path)]) == 0
    ours, committed = (
        (folder / "result.md").read_text().split("## All cells") for folder in (tmp_path, grid.HERE)
    )
    assert ours[1] == committed[1]


def test_the_committed_predictions_are_the_planner_s() -> None:
    kept = json.loads((grid.HERE / "predictions.json").read_text())
    for one in outcomes(kept, {}):
        assert predicted(one.row, one.cell, kept["inputs"]) == pytest.approx(
            one.predicted, abs=1e-3
        )
