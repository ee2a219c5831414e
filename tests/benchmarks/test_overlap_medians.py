"""What the overlap tables make of single steps, and the verdicts that depend on it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.overlap import page
from benchmarks.overlap.medians import mechanism_medians, medians, merged, share_hidden, slower


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


def rows_of(**seconds: float) -> dict[str, dict[str, Any]]:
    return {name: {"seconds": [s, 9.0, s, 0.0, s]} for name, s in seconds.items()}


@pytest.mark.parametrize(
    ("domino_s", "hidden", "speed"), [(1.2, 0.8, 2 / 1.2), (2.5, -0.5, 2 / 2.5)]
)
def test_share_hidden_and_speed_are_of_medians(
    domino_s: float, hidden: float, speed: float
) -> None:
    found = medians(rows_of(none=1.0, sync=2.0, batch=domino_s))
    assert found is not None
    assert (found.share, found.hidden, found.speed) == pytest.approx((0.5, hidden, speed))
    rows = rows_of(**{"none": 1.0, "sync@0.3": 2.0, "batch@0.3": domino_s})
    assert mechanism_medians(rows, "0.3") == found
    assert medians(rows_of(none=1.0, batch=1.2)) is None, "no synchronous row: no share"


def test_the_target_is_that_of_the_nearest_share() -> None:
    assert page.target_of(0.26) == page.Target(0.5, 1.1)
    assert page.target_of(0.31) == page.Target(0.6, 1.25)
    assert page.target_of(0.7) == page.Target(0.6, 1.35)


def test_a_target_that_is_just_reached_is_met() -> None:
    assert page._verdict("hidden", 0.9, 0.9).endswith("| met |")
    assert page._verdict("hidden", 0.899, 0.9).endswith("| missed |")
