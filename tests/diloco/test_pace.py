"""`sync_every="auto"`: what is chosen, what all replicas agree on, and the serial twin."""

from __future__ import annotations

import copy
from itertools import count
from pathlib import Path

import pytest
import torch

from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import pace
from lightning_commfree.diloco.pace import Pacer, Timing, agreed
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.training import (
    ADAMW,
    Net,
    Run,
    alone,
    assert_same_bits,
    backward,
    follow,
    start,
    train,
    twin,
    world,
)
from tests.world import run_ranks

PACES = {20: (20, 5), 60: (30, 2), 93: (10, 7)}  # up, up with a smaller tau, and down
AUTO = {"sync_every": "auto", "num_fragments": 3, "overlap_steps": 2}


def test_who_launches_last_measures_the_link_and_the_slowest_counts() -> None:
    waits, last = Timing(900, 50), Timing(300, 40)
    assert agreed([waits, last]) == Timing(300, 50)
    assert agreed([waits, Timing()]) == Timing(), "not before all have measured"


def test_a_pacer_sends_the_shortest_exchange_and_the_median_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = count()  # every look at it takes a second
    monkeypatch.setattr(pace.time, "perf_counter", lambda: float(next(clock)))
    pacer = Pacer(least_overlap=1, ledger=Ledger())
    assert pacer.timing(0) == Timing(), "nothing was measured"
    for link_s in (0.25, 4.0, 3.0, 5.0, 2.0):
        pacer.step_begins()
        pacer.step_ends()
        with pacer.working(0):
            pass
        pacer.landed(0, link_s, Timing())
    assert pacer.timing(0) == Timing(2_000, 1_000), "of the last four"
    assert pacer.choose(10, 5, 1) == (10, 5), "nobody has agreed on anything"

    pacer.landed(0, 1.0, Timing(15_000, 100))
    assert pacer.choose(10, 5, 1) == (10, 5), "a single choice is not enough"
    assert pacer.choose(10, 5, 1) == (30, 20)


def test_changes_of_pace_equal_the_twin(tmp_path: Path) -> None:
    run = Run(120, AUTO, paces=PACES)
    traces = run_ranks(train, 2, tmp_path, run)
    expected = twin(2, run, traces[0].fragments)
    for rank in range(2):
        assert_same_bits(traces[rank], expected[rank], f"rank {rank}")
    # without restarting the outer optimizers, or without a change, it would end elsewhere
    constant = twin(2, Run(120, AUTO), traces[0].fragments)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(constant[0].outer[-1], expected[0].outer[-1], strict=True)
    )


def resumed_equals(rank: int, size: int, at: list[int], steps: int) -> list[int]:
    """Save after some steps, resume from each, and return the steps whose ends differ."""
    module, channel = Net(), world(rank, size) if size > 1 else alone()
    diloco, optimizer = start(module, channel, **AUTO), ADAMW(module.parameters())
    follow(diloco, PACES)
    saved = {}
    for step in range(1, steps + 1):
        backward(module, rank, step)
        optimizer.step()
        diloco.after_step()
        if step in at:
            state = diloco.state_dict(), optimizer.state_dict(), module.state_dict()
            saved[step] = copy.deepcopy(state)
    found = []
    for step, ((shared, own), inner, local) in saved.items():
        again = Net()
        again.load_state_dict(local)
        other, second = start(again, channel, **AUTO), ADAMW(again.parameters())
        second.load_state_dict(inner)
        follow(other, PACES)
        other.load_state_dict(shared, own)
        for one in range(step + 1, steps + 1):
            backward(again, rank, one)
            second.step()
            other.after_step()
        same = [
            torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
        ]
        if not all(same) or other.schedule != diloco.schedule:
            found.append(step)
    return found


def test_a_run_resumed_around_changes_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """In flight across a change, right before and after it, and with one that is to come."""
    at = [12, 19, 20, 21, 26, 27, 59, 61, 66, 92, 94, 101]
    assert run_ranks(resumed_equals, 2, tmp_path, at, 110) == [[], []]


def test_real_exchanges_are_measured_and_lead_to_a_choice(tmp_path: Path) -> None:
    for agreed_on, paces in run_ranks(measured, 2, tmp_path):
        assert sorted(agreed_on) == [0, 1]
        assert all(one.link > 0 and one.work > 0 for one in agreed_on.values())
        assert paces == [(0, 10, 5)]


def measured(rank: int, size: int) -> tuple[dict[int, Timing], list[tuple[int, ...]]]:
    module, channel = Net(), world(rank, size)
    diloco = start(module, channel, sync_every="auto", num_fragments=2, overlap_steps=2)
    diloco.transport = FixedTransport(channel, timed=True)
    diloco._open_exchanges()
    diloco.pacer.choose = lambda *now: now[:2]  # type: ignore[method-assign]
    optimizer = ADAMW(module.parameters())
    for step in range(1, 80):
        backward(module, rank, step)
        optimizer.step()
        diloco.after_step()
    return diloco.pacer._agreed, [tuple(one) for one in diloco.schedule.paces]
