"""Medians of the bandwidth measurements over rounds, and the verdicts on them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bandwidth.figures import (
    NOT_SLOWER,
    SLOWER,
    Figures,
    baseline,
    figures_by_row,
    verdict_of_rounds,
    verdict_of_steps,
)
from benchmarks.bandwidth.page import headline, table
from tests.benchmarks.records import record


def figures_of(*records: dict[str, Any]) -> list[Figures]:
    found = list(figures_by_row(records, "100mbit").values())
    assert all(isinstance(figures, Figures) for figures in found)
    return found


def test_a_row_is_the_median_over_rounds_of_the_slower_node() -> None:
    rounds = [record("none", ms, 0, round_=i) for i, ms in enumerate([300, 100, 900])]
    rounds += [record("ddp", 600, 8_010_000, round_=i) for i in range(3)]
    none, ddp = figures_of(*rounds)
    assert (none.step_ms, none.wire_bytes, none.ledger_bytes) == (300, 0, None)
    assert (ddp.step_ms, ddp.wire_bytes, ddp.ledger_bytes) == (600, 8_010_000, 4_000_000)
    assert not ddp.ledger_is_counted, "DDP has no ledger, so its bytes are computed"


@pytest.mark.parametrize(
    ("ratio", "by_round", "verdict"),
    [
        (1.0, [], NOT_SLOWER),
        (0.9774, [0.8, 0.95, 1.01], NOT_SLOWER),
        (1.1, [0.99, 0.99, 1.1], "undecided, not slower in at least half of the rounds"),
        (1.1, [0.99, 1.01, 1.1], SLOWER),
        (1.0031, [], SLOWER),
    ],
)
def test_the_verdict_by_rounds(ratio: float, by_round: list[float], verdict: str) -> None:
    assert verdict_of_rounds(ratio, by_round) == verdict


@pytest.mark.parametrize(
    ("ratio", "without_one", "verdict"),
    [
        (1.25, [1.2, 1.3], SLOWER),
        (0.9, [0.9, 0.9], NOT_SLOWER),
        (1.0, [0.9, 1.1], "undecided, it changes if a round is left out"),
        # the median of an even number of rounds is between two values, of an odd number on one
        (1.002, [0.991, 0.999], "undecided, it changes if a round is left out"),
        (0.999, [1.001, 1.002], "undecided, it changes if a round is left out"),
        (1.002, [], SLOWER),
    ],
)
def test_the_verdict_by_steps(ratio: float, without_one: list[float], verdict: str) -> None:
    assert verdict_of_steps(ratio, without_one) == verdict


def test_utilization_is_of_the_rounds_that_a_row_shared_with_its_own_baseline() -> None:
    """PowerSGD and torchft run in other processes than `none`, whose rounds may be slower."""
    rounds = [record("none", ms, round_=i) for i, ms in enumerate([400, 500, 600])]
    for row, ms in (("ddp", 800), ("torchft", 350), ("ddp_powersgd", 390)):
        rounds += [record(row, ms, round_=i) for i in range(3)]
    rounds += [record("torchft_none", 315, round_=i) for i in range(3)]
    rounds += [record("ddp_powersgd_none", 300, round_=i) for i in range(2)]
    found = figures_by_row(rounds, "100mbit")
    assert baseline(found, "ddp") == (500, 500 / 800)
    assert baseline(found, "torchft") == (315, pytest.approx(0.9))
    assert baseline(found, "ddp_powersgd") is None
    lines = {line.split(" | ")[0]: line for line in table(found)}
    assert " | 315.0 | 90.0 % | " in lines["| torchft DiLoCo, no delay"]
    assert " | too few rounds | too few rounds | " in lines["| DDP, PowerSGD rank 4"]
    assert not any("none" in name for name in lines), "baselines have no line of their own"


def test_missed_targets_are_reported() -> None:
    good = [record("none", 300, 0), record("ddp", 2000, 8_010_000)]
    good.append(record("overlap_fp4", 306, 10_100, 10_000))
    bad = [record("none", 300, 0), record("ddp", 600, 4_000_000)]
    bad.append(record("overlap_fp4", 320, 10_400, 10_000))
    for records, verdict in ((good, "met"), (bad, "missed")):
        lines = headline(figures_by_row(records, "100mbit"))[2:]
        assert [line.split("|")[3].strip() for line in lines] == [verdict] * 4
