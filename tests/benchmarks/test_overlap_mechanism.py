"""The overlap benchmark: simulated links, rounds of steps, the hidden share, and verdicts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.overlap import page
from benchmarks.overlap.link import Link, SleepingChannel
from benchmarks.overlap.medians import mechanism_medians, medians, merged, share_hidden, slower
from benchmarks.overlap.methods import Model, batch_of, ours
from benchmarks.overlap.page import most_hidden
from lightning_commfree.comm.ledger import Ledger

TOY = Model(hidden=64, layers=2, heads=4, vocabulary=96, positions=32)
BATCH, TOKENS = 4, 32
HIDDEN_BYTES = BATCH * TOKENS * TOY.hidden * 4
ALL_REDUCES = 4 * TOY.layers  # of attention and MLP, forward and backward


def test_transfers_follow_each_other_and_use_no_cpu() -> None:
    channel = SleepingChannel(2, Ledger())
    channel.link = Link(latency_s=0.02, seconds_per_byte=0.01 / 40)
    tensor = torch.ones(10)
    start, cpu = time.perf_counter(), time.process_time()
    pendings = [channel.all_reduce(tensor, "x") for _ in range(3)]
    arrivals = []
    for pending in pendings:
        assert pending.wait() is tensor
        arrivals.append(time.perf_counter() - start)
    assert [arrival >= 0.03 * (i + 1) for i, arrival in enumerate(arrivals)] == [True] * 3
    assert time.process_time() - cpu < 0.03  # a third of the CPU time of a busy loop
    assert channel.ledger.bytes_sent == 120
    assert channel.ledger.collectives == 3


class Clock:
    """A clock that only advances when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def step_seconds(name: str, body_s: float, sum_s: float) -> float:
    """Simulated seconds of a step, with `body_s` per sublayer and `sum_s` per all-reduce."""
    clock = Clock()
    channel = SleepingChannel(2, Ledger(), lambda: clock.seconds, clock.advance)
    channel.link = Link(seconds_per_byte=sum_s / HIDDEN_BYTES)
    method = ours(name, TOY.build(), channel)
    parts = 1 if name == "sync" else 2

    def compute(event: str, sublayer: str, part: int) -> None:
        if event.startswith("body"):
            clock.advance(body_s / parts)

    assert method.parallel is not None
    method.parallel.trace = compute
    method.step(batch_of((BATCH, TOKENS), TOY.vocabulary))
    return clock.seconds


def test_without_noise_the_schedule_hides_all_that_it_can() -> None:
    """Time passes in sublayers and on the link only.

    An all-reduce as long as a sublayer fits exactly behind the other half; a longer one does not.
    """
    computing_s = step_seconds("sync", body_s=1.0, sum_s=0.0)
    assert computing_s == ALL_REDUCES
    loss_s = 3 * 4 * BATCH * TOKENS / HIDDEN_BYTES
    for sum_s in (0.25, 1.0):
        sync_s = step_seconds("sync", 1.0, sum_s)
        assert sync_s == pytest.approx(ALL_REDUCES + sum_s * (ALL_REDUCES + 2 + loss_s))
        batch_s = step_seconds("batch", 1.0, sum_s)
        hidden = share_hidden(computing_s, sync_s, batch_s)
        without_loss = (ALL_REDUCES + 2) / (ALL_REDUCES + 2 + loss_s)
        assert hidden == pytest.approx(without_loss * most_hidden(TOY.layers))
    hidden = share_hidden(
        ALL_REDUCES, step_seconds("sync", 1.0, 1.5), step_seconds("batch", 1.0, 1.5)
    )
    assert hidden < 0.75 * most_hidden(TOY.layers)


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
        node["rows"]["sync"]["waited"] = []  # PyTorch has no ledger
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
    assert medians(rows_of(none=1.0, batch=1.2)) is None, "there is no synchronous row"


def test_the_target_of_the_nearest_share_applies() -> None:
    assert page.target_of(0.26) == page.Target(0.5, 1.1)
    assert page.target_of(0.31) == page.Target(0.6, 1.25)
    assert page.target_of(0.7) == page.Target(0.6, 1.35)
