"""Runs that take turns: one at a time, in order, each until it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from benchmarks.common.relay import Relay, Run


def runner(log: list[str], name: str, legs: int) -> Run[int]:
    """A run that writes when a leg of it begins and ends, and returns how many it had."""

    def run(pass_on: Callable[[], None]) -> int:
        for leg in range(legs):
            if leg:
                pass_on()
            log.append(f"{name}{leg}")
            log.append(f"{name}{leg}")
        return legs

    return run


def test_legs_follow_in_order_and_a_run_that_has_ended_has_none() -> None:
    log: list[str] = []
    relay = Relay({name: runner(log, name, legs) for name, legs in [("a", 2), ("b", 1), ("c", 4)]})
    assert list(relay.results()) == [("b", 1), ("a", 2), ("c", 4)]
    assert log[::2] == log[1::2], "one at a time"
    assert log[::2] == ["a0", "b0", "c0", "a1", "c1", "c2", "c3"]


def test_the_others_stand_still_while_a_result_is_used() -> None:
    began = threading.Event()

    def run(pass_on: Callable[[], None]) -> int:
        began.set()
        return 2

    results = Relay({"a": runner([], "a", 1), "b": run}).results()
    assert next(results) == ("a", 1)
    assert not began.wait(0.2)
    assert next(results) == ("b", 2)


def test_what_a_run_raises_comes_out_and_the_others_stand_still_for_good() -> None:
    log: list[str] = []

    def broken(pass_on: Callable[[], None]) -> int:
        pass_on()
        raise SystemExit("node 1 is gone")

    relay = Relay({"a": broken, "b": runner(log, "b", 3)})
    with pytest.raises(SystemExit, match="node 1 is gone"):
        list(relay.results())
    assert log == ["b0", "b0"]
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "b"]
    assert waiting.daemon, "it must not keep the process"
