"""The page of the overlap bench from made-up raw results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import page
from benchmarks.overlap.medians import merged, share_hidden, slower


def test_a_step_takes_as_long_as_on_the_slower_node() -> None:
    assert slower([{"s": [1, 5]}, {"s": [2, 3]}], "s") == [2, 5]
    assert share_hidden(none_s=1.0, sync_s=2.0, domino_s=1.25) == 0.75


def test_nodes_are_merged_step_by_step() -> None:
    rows = [
        {"rows": {"sync": {"seconds": [1.0, 5.0], "waited": [0.1, 0.3], "collectives": 7}}},
        {"rows": {"sync": {"seconds": [2.0, 3.0], "waited": [0.3, 0.5], "collectives": 7}}},
    ]
    (row,) = merged(rows).values()
    assert (row["seconds"], row["collectives"]) == ([2.0, 5.0], 7)
    assert row["waited"] == pytest.approx([0.2, 0.4])
    for node in rows:
        node["rows"]["sync"]["waited"] = []  # a peer has no ledger
    assert merged(rows)["sync"]["waited"] == []


def timings(ms: float, waited_ms: float = 0.0, loss: float = 4.0) -> dict[str, Any]:
    return {
        "seconds": [ms / 1e3] * 3,
        "waited": [waited_ms / 1e3] * 3,
        "collectives": 10,
        "payload_bytes": 2_000_000,
        "wire_bytes": [2_100_000] * 3,
        "first_loss": loss,
    }


def content(domino_ms: float = 120.0, **rows: dict[str, Any]) -> dict[str, Any]:
    """Raw results: no communication 100 ms, synchronous 200 ms."""
    lab = {
        "none": timings(100, loss=1.0),
        "none_split": timings(105, loss=1.0),
        "sync": timings(200, 90),
        "batch": timings(domino_ms, 8),
        "torch": {**timings(240), "waited": [], "collectives": 0},
        **rows,
    }
    small = {"none": timings(10), "sync": timings(20), "batch": timings(25)}
    shapes = [
        {"shape": [8, 128], "rows": lab, "missing": {"transformers": "No module named it"}},
        {"shape": [2, 8], "rows": small, "missing": {}},
    ]
    mechanism = {"none": timings(100), "none_split": timings(101)}
    for share in page.MECHANISM_TARGETS:
        mechanism[f"sync@{share}"] = timings(200, 95)
        mechanism[f"batch@{share}"] = timings(115, 12)
    link = {"latency_s": 1e-4, "seconds_per_byte": 1e-8}
    return {
        "settings": dict.fromkeys(overlap._SETTINGS, 1) | {"shape": [8, 128]},
        "mechanism": {
            "compute_s": 0.1,
            "links": dict.fromkeys(page.MECHANISM_TARGETS, link),
            "rows": mechanism,
        },
        "laboratory": {"1gbit": [shapes, shapes]},
    }


def verdicts(lines: list[str]) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {cell[0]: " ".join(cell[1:]).strip() for cell in cells}


def test_the_headline_says_target_figure_and_verdict() -> None:
    found = verdicts(page.headline(content()))
    time_only = "links that only take time, {} of the synchronous step: hidden, at least {}"
    assert found[time_only.format("30%", "90%")] == "85.0% missed"
    assert found[time_only.format("45%", "80%")] == "85.0% met"
    half = "two nodes at 1gbit, 50% of the synchronous step: hidden, at least 60%"
    assert found[half] == "80.0% met"
    assert found["two nodes at 1gbit: speed / synchronous, at least 1.35"] == "1.67 met"
    peer = "two nodes at 1gbit: speed / PyTorch's `parallelize_module`, at least 1"
    assert found[peer] == "2.00 met"
    slow = verdicts(page.headline(content(domino_ms=250)))
    assert slow[half] == "-50.0% missed"
    assert slow["two nodes at 1gbit: speed / synchronous, at least 1.35"] == "0.80 missed"
    assert slow[peer] == "0.96 missed"
    assert verdicts(page.headline({**content(), "laboratory": {}}))["two nodes"] == "not measured"


def test_the_target_is_that_of_the_nearest_share() -> None:
    found = verdicts(page.headline(content(sync=timings(136, 30))))
    quarter = "two nodes at 1gbit, 26% of the synchronous step: hidden, at least 50%"
    assert found[quarter] == "44.4% missed"
    assert "two nodes at 1gbit: speed / synchronous, at least 1.1" in found


def test_the_page_says_what_ran_where_time_went_and_where_splitting_loses() -> None:
    lines = page.page_lines(content(), "node 0", "overlap")
    text = "\n".join(lines)
    assert "## Two nodes at 1gbit: synchronous share 50.0%" in lines
    assert (
        '| Domino (`split="batch"`) | 120.0 | 120.0 to 120.0 | 1.67 | 80.0% | 8.0 | 10 | 2.00 |'
        " 2.10 |"
    ) in lines
    assert "| transformers' `tp_plan` | did not run: No module named it |" in lines
    assert "100.0 to 120.0 ms: +5.0 ms for smaller products" in text
    assert "+8.0 ms waiting for sums, +7.0 ms in which gloo's threads" in text
    assert "differ by 0.0e+00: the same model." in text
    assert "| 1gbit | 8 x 128 | 200 | 100.0 | 200.0 | 120.0 | 1.67 | splitting wins |" in lines
    assert "| 1gbit | 2 x 8 | 200 | 10.0 | 20.0 | 25.0 | 0.80 | splitting loses |" in lines
    assert "![One step, node 0](overlap.png)" in lines


def test_a_peer_with_another_model_is_seen() -> None:
    raw = content(torch=timings(240, loss=4.01))
    text = "\n".join(page.page_lines(raw, None, "overlap"))
    assert "NOT the same model" in text
    assert "![" not in text


def test_a_page_without_rows_to_compare_says_so() -> None:
    raw = content()
    raw["mechanism"] = None
    for node in raw["laboratory"]["1gbit"]:
        node[0]["rows"] = {"torch": timings(240)}
    found = verdicts(page.headline(raw))
    assert found["two nodes at 1gbit"] == "rows are missing"
    assert "## Two nodes at 1gbit" in page.page_lines(raw, None, "overlap")
