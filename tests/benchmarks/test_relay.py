"""Runs and operations that take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from benchmarks.common.relay import Relay, Run
from benchmarks.common.timing import take_turns


def runner(log: list[str], name: str, legs: int) -> Run[int]:
    """A run that logs the start and end of each leg, and returns the number of legs."""

    def run(pass_on: Callable[[], None]) -> int:
        for leg in range(legs):
            if leg:
                pass_on()
            log.append(f"{name}{leg}")
            log.append(f"{name}{leg}")
        return legs

    return run


def test_legs_alternate_until_a_run_ends() -> None:
    log: list[str] = []
    relay = Relay({name: runner(log, name, legs) for name, legs in [("a", 2), ("b", 1), ("c", 4)]})
    assert list(relay.results()) == [("b", 1), ("a", 2), ("c", 4)]
    assert log[::2] == log[1::2], "one at a time"
    assert log[::2] == ["a0", "b0", "c0", "a1", "c1", "c2", "c3"]


def test_the_others_are_paused_while_a_result_is_used() -> None:
    began = threading.Event()

    def run(pass_on: Callable[[], None]) -> int:
        began.set()
        return 2

    results = Relay({"a": runner([], "a", 1), "b": run}).results()
    assert next(results) == ("a", 1)
    assert not began.wait(0.2)
    assert next(results) == ("b", 2)


def test_an_exception_is_raised_and_the_others_stay_paused() -> None:
    log: list[str] = []

    def broken(pass_on: Callable[[], None]) -> int:
        pass_on()
        raise SystemExit("node 1 is lost")

    relay = Relay({"a": broken, "b": runner(log, "b", 3)})
    with pytest.raises(SystemExit, match="node 1 is lost"):
        list(relay.results())
    assert log == ["b0", "b0"]
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "b"]
    assert waiting.daemon, "it must not keep the process alive"


def test_operations_are_compared_by_medians_without_the_first_round() -> None:
    """Each operation returns its own simulated duration, round by round."""
    simulated = {"first": iter([90.0, 2.0, 1.0, 4.0]), "slow": iter([0.0, 6.0, 5.0, 70.0])}
    operations = {name: seconds.__next__ for name, seconds in simulated.items()}
    timings = take_turns(operations, rounds=3, seconds_of=lambda operation: operation())
    assert timings == {"first": (2.0, 1.0), "slow": (6.0, 3.0)}
