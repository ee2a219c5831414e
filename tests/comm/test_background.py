"""The thread beside the training: one job after the other, until one fails."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.ledger import Ledger


def test_jobs_run_in_their_order_in_one_thread() -> None:
    ran: list[tuple[int, int]] = []
    background = Background(Ledger())

    def job(i: int) -> int:
        ran.append((i, threading.get_ident()))
        return i

    pendings = [background.submit(partial(job, i), "t") for i in range(5)]
    assert [pending.wait() for pending in reversed(pendings)] == [4, 3, 2, 1, 0]
    background.close()
    assert [i for i, _ in ran] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in ran} | {threading.get_ident()}) == 2


def test_after_a_failure_nothing_is_exchanged_any_more() -> None:
    """Its peers took part in what failed here: the next exchange would meet another of theirs."""
    ran: list[str] = []
    background = Background(Ledger())

    def fail() -> None:
        raise ValueError("out of memory")

    failed = background.submit(fail, "t")
    later = background.submit(lambda: ran.append("later"), "t")
    for pending in (failed, later, background.submit(lambda: ran.append("new"), "t")):
        with pytest.raises(ValueError, match="out of memory"):
            pending.wait()
    background.close()
    assert not ran


def test_closing_waits_for_nothing_and_gives_up_what_is_queued() -> None:
    begun, let_go = threading.Event(), threading.Event()
    ran: list[str] = []
    background = Background(Ledger())

    def long() -> bool:
        begun.set()
        return let_go.wait(10.0)

    first = background.submit(long, "t")
    background.submit(lambda: ran.append("queued"), "t")
    assert begun.wait(10.0)
    background.close()
    let_go.set()
    assert first.wait()
    assert not ran


def test_a_wait_for_the_ranks_own_device_is_not_counted() -> None:
    """The event of the last kernel passes late; the peers were there long before."""
    ledger = Ledger()
    background = Background(ledger)
    passed = threading.Event()
    timer = threading.Timer(0.5, passed.set)
    pending = background.submit(lambda: passed.wait(10.0), "t", staged=lambda: passed.wait(10.0))
    timer.start()
    assert pending.wait()
    assert ledger.seconds_waited < 0.25
    slow = threading.Timer(0.5, passed.set)
    passed.clear()
    pending = background.submit(lambda: passed.wait(10.0), "t")
    slow.start()
    assert pending.wait()
    assert ledger.seconds_waited > 0.25
    background.close()
