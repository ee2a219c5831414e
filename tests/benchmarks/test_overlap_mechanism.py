"""The overlap benchmark: simulated links, rounds of steps, the hidden share, and verdicts."""

from __future__ import annotations

import pytest

from benchmarks.overlap.link import Link, SleepingChannel
from benchmarks.overlap.medians import share_hidden
from benchmarks.overlap.methods import Model, batch_of, ours
from benchmarks.overlap.page import most_hidden
from lightning_commfree.comm.ledger import Ledger

TOY = Model(hidden=64, layers=2, heads=4, vocabulary=96, positions=32)
BATCH, TOKENS = 4, 32
HIDDEN_BYTES = BATCH * TOKENS * TOY.hidden * 4
ALL_REDUCES = 4 * TOY.layers  # of attention and MLP, forward and backward


class Clock:
    """A clock that only advances when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def step_seconds(name: str, body_s: float, sum_s: float, weights_s: float = 0.0) -> float:
    """Simulated seconds of a step: per sublayer's body, all-reduce, and gradients of weights."""
    clock = Clock()
    channel = SleepingChannel(2, Ledger(), lambda: clock.seconds, clock.advance)
    channel.link = Link(seconds_per_byte=sum_s / HIDDEN_BYTES)
    method = ours(name, TOY.build(), channel)
    parts = 2 if name == "batch" else 1

    def compute(event: str, sublayer: str, part: int) -> None:
        if event.startswith("body"):
            clock.advance(body_s / parts)
        elif event.startswith("weights"):
            clock.advance(weights_s / parts)

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


def test_without_a_split_gradients_of_weights_hide_the_sums_of_backward() -> None:
    """A sum that is longer than they are does not fit."""
    loss_s = 3 * 4 * BATCH * TOKENS / HIDDEN_BYTES
    backward = ALL_REDUCES / 2
    computing_s = step_seconds("unsplit", 1.0, 0.0, weights_s=1.0)
    assert computing_s == ALL_REDUCES + backward
    for sum_s in (0.25, 1.0, 1.5):
        exposed_s = step_seconds("unsplit", 1.0, sum_s, weights_s=1.0) - computing_s
        too_long_s = backward * max(sum_s - 1.0, 0.0)
        assert exposed_s == pytest.approx(sum_s * (backward + 2 + loss_s) + too_long_s)
