"""Where the epochs of ranks end: after the same step, apart, or on a rank that is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

from lightning_commfree.comm import liveness
from lightning_commfree.comm.liveness import AgreedError, PeerLostError, PeerWatch
from lightning_commfree.fit.stopping import EpochEnds
from tests.comm.watches import LONG, Endless, fall_silent, watches

SIZE = 3


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(liveness, "SUSPECT_SECONDS", 0.2)
    monkeypatch.setattr(liveness, "GONE_SECONDS", 1.0)
    monkeypatch.setattr(liveness, "HUNG_SECONDS", 2.0)


@contextmanager
def ranks(timeout: timedelta = LONG) -> Iterator[list[tuple[EpochEnds, PeerWatch]]]:
    with watches(SIZE, timeout) as opened:
        yield [(EpochEnds(watch), watch) for watch in opened]


def run(*calls: Callable[[], None]) -> list[str]:
    """Run the calls at the same time; return the error of each, or an empty string."""
    with ThreadPoolExecutor(len(calls)) as threads:
        errors = [future.exception(20.0) for future in [threads.submit(call) for call in calls]]
    assert all(error is None or isinstance(error, AgreedError) for error in errors), errors
    return [str(error or "") for error in errors]


def train(ends: EpochEnds, steps: int) -> None:
    """Train two epochs of so many steps."""
    done = 0
    for epoch in (0, 1):
        for _ in range(steps):
            done += 1
            ends.step_begins(epoch, done)
            ends.has_more(epoch, done)
        ends.end(epoch, done, out_of_data=True)
        ends.end(epoch, done)  # a second time it returns at once


def test_epochs_of_equal_length_end_well() -> None:
    with ranks() as opened:
        calls = [lambda ends=ends: train(ends, 3) for ends, _ in opened]
        assert run(*calls) == [""] * SIZE


@pytest.mark.parametrize("steps", [(5, 3, 5), (3, 5, 5), (5, 5, 3)])
def test_every_rank_raises_the_same_error(steps: tuple[int, ...]) -> None:
    with ranks() as opened:
        calls = [
            lambda ends=ends, n=n: train(ends, n)
            for (ends, _), n in zip(opened, steps, strict=True)
        ]
        errors = run(*calls)
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"The data of rank {steps.index(3)} ended after step 3, in epoch 0")
    assert "`limit_train_batches`" in errors[0]


def test_a_rank_that_waits_for_an_exchange_raises_it_too() -> None:
    with ranks() as ((first, watch), (second, _), (third, third_watch)):
        first.step_begins(0, 4)
        second.step_begins(0, 3)
        third.step_begins(0, 3)
        errors = run(
            lambda: watch.wait([Endless()], "t"),
            lambda: second.end(0, 3),
            lambda: third_watch.wait([Endless()], "t"),
        )
        assert len(set(errors)) == 1
        assert "ended after step 3, in epoch 0, and rank 0 has begun step 4" in errors[0]
        with pytest.raises(AgreedError, match="rank 0 has begun step 4"):
            third.step_begins(0, 4)  # it need not wait for anything


def test_data_that_end_where_another_rank_validates_are_uneven() -> None:
    """Rank 0 would wait in its validation, and not begin the step that tells it."""
    with ranks() as ((first, _), (second, _), (third, _)):
        first.has_more(0, 3)
        third.step_begins(0, 3)
        second.step_begins(0, 3)
        with pytest.raises(AgreedError, match="data of rank 1 ended after step 3, .* rank 0 has m"):
            second.end(0, 3, out_of_data=True)


def test_a_hook_may_end_the_epochs_of_all_ranks_before_their_data_end() -> None:
    with ranks() as opened:
        for ends, _ in opened:
            ends.has_more(0, 3)
        assert run(*[lambda ends=ends: ends.end(0, 3) for ends, _ in opened]) == [""] * SIZE


def test_a_silent_rank_is_named_long_before_the_timeout() -> None:
    with ranks() as ((first, _), (second, _), (third, watch)):
        second.step_begins(0, 1)
        third.step_begins(0, 1)
        time.sleep(0.3)
        fall_silent(watch)
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="'end of epoch' failed.*rank 2 is gone"):
            first.end(0, 1)
        assert time.monotonic() - start < 5.0


def test_a_rank_that_left_before_its_end_is_named_and_not_one_that_left_after_it() -> None:
    with ranks() as ((first, _), (second, other), (third, watch)):
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(ends.end, 0, 1) for ends in (second, third)]
            first.end(0, 1)
            for wait in waits:
                wait.result(5.0)
        watch.close(owner=True)
        first.end(0, 1)  # rank 2 has ended this epoch
        second.step_begins(1, 2)
        other.close(owner=True)
        first.step_begins(1, 2)
        with pytest.raises(PeerLostError, match=r"rank 1 is gone \(it ended its fit earlier"):
            first.end(1, 2)


def test_a_slow_rank_is_named_at_the_timeout() -> None:
    with (
        ranks(timedelta(seconds=2)) as ((first, _), (second, _), (third, _)),
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(third.end, 0, 1)
        second.step_begins(0, 1)
        with pytest.raises(PeerLostError, match="rank 1 has not reached the end of epoch 0"):
            first.end(0, 1)
        assert isinstance(waiting.exception(5.0), PeerLostError)


def test_with_liveness_off_nothing_is_compared() -> None:
    ends = EpochEnds(PeerWatch([0, 1], 0))
    ends.step_begins(0, 1)
    ends.end(0, 1)
