"""Overlap: links that only take time, rounds of steps, and what the schedule can hide at most."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap.link import Link, SleepingChannel, link_for
from benchmarks.overlap.medians import share_hidden
from benchmarks.overlap.page import most_hidden
from benchmarks.overlap.rounds import Entry, play_rounds
from benchmarks.overlap.ways import Model, batch_of, ours
from lightning_commfree.comm.ledger import Ledger

TOY = Model(hidden=64, layers=2, heads=4, vocabulary=96, positions=32)
BATCH, TOKENS = 4, 32
HIDDEN_BYTES = BATCH * TOKENS * TOY.hidden * 4
SUMS = 4 * TOY.layers  # of attention and MLP, forward and backward


# -- the link


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
    assert time.process_time() - cpu < 0.03  # a third of what a loop that spins would use
    assert channel.ledger.bytes_sent == 120
    assert channel.ledger.collectives == 3


def test_what_has_arrived_is_not_waited_for() -> None:
    channel = SleepingChannel(2, Ledger())
    channel.link = Link(latency_s=0.05)
    pending = channel.all_gather(torch.arange(3), "x")
    time.sleep(0.06)
    assert pending.wait().tolist() == [[0, 1, 2]] * 2
    assert channel.ledger.seconds_waited < 0.02


def test_a_link_makes_the_share_that_is_asked_for() -> None:
    link = link_for(0.2, compute_s=1.0, transfers=10, num_bytes=1000, latency_s=0.005)
    assert 10 * link.latency_s + 1000 * link.seconds_per_byte == pytest.approx(0.25)
    assert link.seconds(100) == pytest.approx(0.005 + 0.02)
    with pytest.raises(ValueError, match="take longer than the 0.2500 s that are 20% of the step"):
        link_for(0.2, compute_s=1.0, transfers=10, num_bytes=1000, latency_s=0.03)


# -- rounds


def test_the_order_rotates_and_warm_up_is_left_out() -> None:
    played, fences = [], []

    def way(name: str) -> Any:
        return SimpleNamespace(
            ledger=None, step=lambda _: played.append(name) or float(len(played))
        )

    entries = {name: Entry(way(name)) for name in "abc"}
    timings = play_rounds(
        entries, torch.zeros(1), rounds=3, warm_up=1, fence=lambda: fences.append(0)
    )
    assert "".join(played) == "abcbcacababc"
    assert len(fences) == 2 * len(played)
    assert [len(timings[name].seconds) for name in "abc"] == [3, 3, 3]
    assert [timings[name].first_loss for name in "abc"] == [1.0, 2.0, 3.0]


# -- the mechanism at toy size


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def played_seconds(name: str, body_s: float, sum_s: float) -> float:
    """Seconds of a step in which all bodies of a sublayer take `body_s`, a whole sum `sum_s`."""
    clock = Clock()
    channel = SleepingChannel(2, Ledger(), lambda: clock.seconds, clock.advance)
    channel.link = Link(seconds_per_byte=sum_s / HIDDEN_BYTES)
    way = ours(name, TOY.build(), channel)
    parts = 1 if name == "sync" else 2

    def compute(event: str, sublayer: str, part: int) -> None:
        if event.startswith("body"):
            clock.advance(body_s / parts)

    assert way.parallel is not None
    way.parallel.trace = compute
    way.step(batch_of((BATCH, TOKENS), TOY.vocabulary))
    return clock.seconds


def test_by_the_clock_all_is_hidden_that_can_be() -> None:
    """No noise: time passes in bodies and on the link only.

    A sum as long as a sublayer fits just behind the other part's; half as long again does not.
    """
    computing_s = played_seconds("sync", body_s=1.0, sum_s=0.0)
    assert computing_s == SUMS
    loss_s = 3 * 4 * BATCH * TOKENS / HIDDEN_BYTES
    for sum_s in (0.25, 1.0):
        sync_s = played_seconds("sync", 1.0, sum_s)
        assert sync_s == pytest.approx(SUMS + sum_s * (SUMS + 2 + loss_s))
        batch_s = played_seconds("batch", 1.0, sum_s)
        hidden = share_hidden(computing_s, sync_s, batch_s)
        without_loss = (SUMS + 2) / (SUMS + 2 + loss_s)
        assert hidden == pytest.approx(without_loss * most_hidden(TOY.layers))
    hidden = share_hidden(SUMS, played_seconds("sync", 1.0, 1.5), played_seconds("batch", 1.0, 1.5))
    assert hidden < 0.75 * most_hidden(TOY.layers)


def test_the_mechanism_makes_links_for_the_shares(tmp_path: Path) -> None:
    found = overlap.mechanism(TOY, [BATCH, TOKENS], 3, 1e-6, tmp_path)
    for share in overlap.SHARES:
        link = found["links"][str(share)]
        for way, parts in (("sync", 1), ("batch", 2)):
            row = found["rows"][f"{way}@{share}"]
            assert row["collectives"] == (SUMS + 1) * parts + 2  # the embedding's; head, loss
            transfers_s = row["collectives"] * link["latency_s"]
            transfers_s += row["payload_bytes"] * link["seconds_per_byte"]
            expected_s = found["compute_s"] * share / (1 - share)
            assert transfers_s == pytest.approx(expected_s, abs=1e-6 * (SUMS + 1) + 1e-9)
            # one link: a step cannot be over before all its transfers are
            assert min(row["seconds"]) >= transfers_s
    assert {file.name for file in (tmp_path / "mechanism").iterdir()} == {"sync.json", "batch.json"}
