"""The formulas against a ring that is walked by hand, and sums by tag."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from lightning_commfree.comm import ledger as ledger_module
from lightning_commfree.comm.background import Background
from lightning_commfree.comm.ledger import (
    END,
    START,
    STEPS,
    VALIDATION,
    Ledger,
    all_gather_bytes,
    all_to_all_bytes,
    broadcast_bytes,
    ring_all_reduce_bytes,
)

FORMULAS = (ring_all_reduce_bytes, all_gather_bytes, all_to_all_bytes, broadcast_bytes)


@pytest.mark.parametrize(
    ("size", "all_reduce", "all_gather", "all_to_all", "broadcast"),
    [(1, 0, 0, 0, 0), (2, 12, 12, 6, 6), (3, 16, 24, 8, 8), (4, 18, 36, 9, 9)],
)
def test_twelve_bytes_by_hand(
    size: int, all_reduce: int, all_gather: int, all_to_all: int, broadcast: int
) -> None:
    expected = [all_reduce, all_gather, all_to_all, broadcast]
    assert [formula(12, size) for formula in FORMULAS] == expected


def test_waits_add_up_by_tag_and_count_when_the_transfer_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([10.0, 10.5, 20.0, 22.0, 30.0, 30.25])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(ledger_module, "time", clock)
    ledger = Ledger()
    with ledger.count_wait("a"):
        pass
    with ledger.count_wait("b"):
        pass
    with pytest.raises(RuntimeError, match="peer"), ledger.count_wait("a"):
        raise RuntimeError("the peer died")
    assert ledger.seconds_by_tag == {"a": 0.75, "b": 2.0}
    assert ledger.seconds_waited == 2.75
    assert ledger.collectives == 0, "a wait is no collective"


def test_every_byte_and_second_has_its_phase() -> None:
    ledger = Ledger()
    ledger.count_sent("a", 3)
    ledger.phase = STEPS
    ledger.count_sent("a", 4)
    with ledger.count_wait("a"):
        pass
    with ledger.during(END):
        ledger.count_sent("b", 5)
    ledger.count_sent("b", 6)
    assert ledger.bytes_by_phase == {START: {"a": 3}, STEPS: {"a": 4, "b": 6}, END: {"b": 5}}
    assert (ledger.bytes_in(STEPS), ledger.bytes_in(VALIDATION)) == (10, 0)
    assert set(ledger.seconds_by_phase) == {STEPS}
    assert sum(map(ledger.bytes_in, (START, STEPS, END))) == ledger.bytes_sent


def test_bytes_launched_in_a_step_count_for_it_during_a_validation() -> None:
    """The thread of the exchanges is slow: it sends when the training has gone on."""
    ledger, validating = Ledger(phase=STEPS), threading.Event()

    def send() -> None:
        validating.wait()
        ledger.count_sent("a", 3)

    background = Background(ledger)
    pending = background.submit(send, "a")
    with ledger.during(VALIDATION):
        ledger.count_sent("b", 5)
        validating.set()
        pending.wait()
    background.close()
    assert ledger.bytes_by_phase == {STEPS: {"a": 3}, VALIDATION: {"b": 5}}


def test_a_ledger_that_follows_another_counts_in_its_phases() -> None:
    first = Ledger()
    second = Ledger(follows=first)
    first.phase = STEPS
    second.count_sent("inside", 8)
    with first.during(END), second.count_wait("inside"):
        second.count_sent("inside", 2)
    assert second.bytes_in(STEPS) == 8
    assert second.bytes_in(END) == 2
    assert list(second.seconds_by_phase) == [END]
