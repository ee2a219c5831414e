"""Runs and operations that take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from benchmarks.common.relay import Relay, Run


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
