"""The stopwatch of the bandwidth benchmarks: where its legs end, and what it counts."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.bandwidth import window
from benchmarks.lab import Counters
from lightning_commfree import StreamingDiLoCoStrategy
from tests.strategies.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks

STEPS = 10


@pytest.fixture(autouse=True)
def _interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends 100 bytes between two readings."""
    sent = count(step=100)
    monkeypatch.setattr(window, "interface_counters", lambda: Counters(next(sent), 0))
    monkeypatch.setattr(window, "dist", SimpleNamespace(barrier=lambda: None))


def fit_that_overlaps(rank: int, size: int) -> tuple[list[int], window.Window]:
    """Return the steps after which the fit paused, and the window."""
    strategy = StreamingDiLoCoStrategy(sync_every=STEPS, num_fragments=2, overlap_steps=4)
    passed: list[int] = []

    def pass_on() -> None:
        passed.append(trainer.global_step)
        assert strategy.algorithm.in_flight == []

    stopwatch = window.Stopwatch("row", STEPS, STEPS, pass_on)
    steps = window.WARM_UP + STEPS + 1
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, callbacks=[stopwatch])
    trainer.fit(Tiny(), loader(rows=2 * steps))
    assert stopwatch.window is not None
    return passed, stopwatch.window


def test_no_leg_ends_with_a_fragment_in_flight(tmp_path: Path) -> None:
    """In the window, fragments leave after steps 1 and 6 and land after 5 and 10."""
    ((passed, made),) = run_ranks(fit_that_overlaps, 1, tmp_path)
    assert passed == [3, 8]
    assert made.wire_bytes == 200
    assert made.ledger_bytes == 0, "one replica sends nothing"
    assert len(made.own_s) == STEPS
    assert made.waited_s == 0.0
