"""The stopwatch of the bandwidth tables: where its legs end, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from typing_extensions import override

from benchmarks.bandwidth import window
from benchmarks.lab import Counters
from lightning_commfree import StreamingDiLoCoStrategy
from tests.strategies.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks

STEPS = 10


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An interface that sends 100 bytes between any two looks at it; looks, barriers and passes."""
    seen: list[str] = []
    sent = count(step=100)

    def look() -> Counters:
        seen.append("look")
        return Counters(next(sent), 0)

    monkeypatch.setattr(window, "interface_counters", look)
    monkeypatch.setattr(window, "dist", SimpleNamespace(barrier=lambda: seen.append("barrier")))
    return seen


def measured(
    strategy: Strategy, module: Tiny | None = None, between: Callable[[], None] = lambda: None
) -> tuple[list[int], window.Window]:
    """Return the steps after which the baton was passed on, and the window."""
    passed: list[int] = []

    def pass_on() -> None:
        between()
        passed.append(trainer.global_step)
        if isinstance(strategy, StreamingDiLoCoStrategy):
            assert strategy.algorithm.in_flight == []

    stopwatch = window.Stopwatch("row", STEPS, STEPS, pass_on)
    steps = window.WARM_UP + STEPS + 1
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, callbacks=[stopwatch])
    trainer.fit(module or Tiny(), loader(rows=2 * steps))
    assert stopwatch.window is not None
    return passed, stopwatch.window


def test_a_leg_has_three_steps_and_every_leg_counts(looks: list[str]) -> None:
    passed, made = measured(
        SingleDeviceStrategy(device="cpu"), between=lambda: looks.append("pass")
    )
    assert looks == ["pass", "barrier", "look", "barrier", "look"] * 4
    assert window.LEG_STEPS == 3
    assert passed == [3, 6, 9, 12]
    assert made.wire_bytes == 400, "what is sent between legs is not counted"
    assert made.steps == len(made.step_s) == STEPS
    assert made.seconds == sum(made.step_s) > 0
    assert made.ledger_bytes is None
    assert list(made.own_s) == []


def fit_that_overlaps(rank: int, size: int) -> tuple[list[int], window.Window]:
    return measured(StreamingDiLoCoStrategy(sync_every=STEPS, num_fragments=2, overlap_steps=4))


def test_no_leg_ends_with_a_fragment_in_flight(tmp_path: Path) -> None:
    """In the window the fragments leave after its steps 1 and 6 and land after 5 and 10."""
    ((passed, made),) = run_ranks(fit_that_overlaps, 1, tmp_path)
    assert passed == [3, 8]
    assert made.wire_bytes == 200
    assert made.ledger_bytes == 0, "one replica sends nothing"
    assert len(made.own_s) == STEPS
    assert made.waited_s == 0.0


def test_time_between_legs_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(Tiny):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nonlocal now
            now += 1.0
            return super().training_step(batch, batch_idx)

    def between() -> None:
        nonlocal now
        now += 1000.0

    clock = SimpleNamespace(
        perf_counter=lambda: now, process_time=lambda: 2 * now, thread_time=lambda: now
    )
    monkeypatch.setattr(window, "time", clock)
    _, made = measured(SingleDeviceStrategy(device="cpu"), Slow(), between)
    assert made.step_s == [1.0] * STEPS
    assert made.beside_s == STEPS
