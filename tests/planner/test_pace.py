"""The rule of `sync_every="auto"`."""

from __future__ import annotations

import pytest

from commfree_planner import Model, Training
from commfree_planner.pace import auto_pace, choose_pace

# 124M parameters: 14.3 steps of 350 ms at 100 Mbit/s, the embeddings 4.5 of them
SMALL = (4.5, 2.5, 2.5, 2.5, 2.3)


@pytest.mark.parametrize(
    ("links", "work", "now", "expected"),
    [
        ((0.35, 0.34), 0.0, (10, 5), (10, 5)),  # nothing to do
        (SMALL, 0.0, (10, 5), (20, 10)),  # H >= 17.9, tau >= 5.6
        ((0.1,), 0.38, (10, 5), (20, 5)),  # its own work is 2 % of 19 steps
        ((0.1,), 0.18, (20, 5), (20, 5)),  # and of 9, but 1.6 % of 11.25 on the way down: it stays
        ((0.1,), 0.15, (20, 5), (10, 5)),
        ((8.3, 8.2), 0.0, (20, 15), (30, 15)),  # H >= 20.6
        ((7.0, 7.0), 0.0, (20, 10), (20, 10)),  # H >= 17.5
        ((7.0, 7.0), 0.0, (30, 10), (30, 10)),  # but 21.9 on the way down
        ((6.0, 6.0), 0.0, (30, 10), (20, 10)),
        ((12.0,), 0.0, (100, 20), (30, 15)),  # 20 would do, but what is in flight lands after 20
        ((12.0,), 0.0, (30, 15), (20, 15)),
        ((14.3,), 0.0, (10, 5), (30, 20)),  # in one piece: tau >= 17.9
        ((0.5,), 0.0, (200, 100), (200, 5)),
        ((0.5,), 0.0, (200, 5), (10, 5)),
        ((900.0,), 0.0, (10, 5), (200, 100)),  # the link is too slow for all of them
    ],
)
def test_the_shortest_cycle_that_hides_the_exchanges_is_chosen(
    links: tuple[float, ...], work: float, now: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert choose_pace(links, work, *now, least_overlap=5) == expected


def test_the_overlap_is_at_least_the_users() -> None:
    assert choose_pace((0.5, 0.5), 0.0, 10, 8, least_overlap=8) == (10, 8)
    assert choose_pace((9.0,), 0.0, 10, 8, least_overlap=8) == (20, 15)


@pytest.mark.parametrize(
    ("gbit_per_s", "latency_s", "expected"),
    [(1.0, 0.0, (10, 5)), (0.1, 0.0, (20, 10)), (0.1, 0.1, (30, 10)), (0.01, 0.0, (200, 75))],
)
def test_a_plan_of_gpt2_small(
    gbit_per_s: float, latency_s: float, expected: tuple[int, int]
) -> None:
    model = Model((7_087_872,) * 12, 39_385_344)
    training = Training(model, 0.35, latency_s=latency_s)
    assert auto_pace(training, gbit_per_s) == expected


def test_own_work_needs_a_longer_cycle() -> None:
    model = Model((7_087_872,) * 12, 39_385_344)
    assert auto_pace(Training(model, 0.35, sync_seconds=0.3), 1.0) == (50, 5)
