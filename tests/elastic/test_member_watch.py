"""An exchange ends when a member hangs; not when the rendezvous is away or has forgotten it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_commfree.elastic import member_watch
from lightning_commfree.elastic.member_watch import MemberWatch


class Transfer:
    """A collective that takes a while."""

    def __init__(self, seconds: float, error: str = "") -> None:
        self.end_s, self.error = time.monotonic() + seconds, error

    def is_completed(self) -> bool:
        return time.monotonic() >= self.end_s

    def wait(self, limit: timedelta) -> None:
        time.sleep(min(limit.total_seconds(), max(0.0, self.end_s - time.monotonic())))
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


class Rendezvous:
    def __init__(self, **ages: float) -> None:
        self.ages, self.start_s, self.is_away, self.reads = ages, time.monotonic(), False, 0

    def heartbeats(self) -> dict[str, float]:
        self.reads += 1
        if self.is_away:
            raise ConnectionError
        passed = time.monotonic() - self.start_s
        return {name: age + passed if age else age for name, age in self.ages.items()}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_watch, "_READ_EVERY_S", 0.1)


def wait(rendezvous: Rendezvous, *works: Any) -> None:
    MemberWatch(rendezvous, ["a", "b"], timeout_s=5.0).wait(works, "outer")


def test_a_member_without_a_heartbeat_breaks_the_exchange() -> None:
    rendezvous, start = Rendezvous(a=0.0, b=4.6), time.monotonic()
    with pytest.raises(RuntimeError, match=r"'outer' was abandoned.*: b \(5 s\)\. They are hung"):
        wait(rendezvous, Transfer(0.0), Transfer(20.0))
    assert 0.4 <= time.monotonic() - start < 3.0


def test_the_next_read_is_due_when_the_oldest_heartbeat_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_watch, "_READ_EVERY_S", 2.0)
    rendezvous, start = Rendezvous(a=0.0, b=2.8), time.monotonic()
    with pytest.raises(RuntimeError, match="b .5 s"):
        wait(rendezvous, Transfer(20.0))
    assert 2.0 <= time.monotonic() - start < 3.5


@pytest.mark.parametrize("known", ["away", "restarted", "alive"])
def test_without_a_silent_member_it_goes_on(known: str) -> None:
    """A replica outside of the view may be as silent as it likes."""
    rendezvous = Rendezvous(stranger=60.0, **({} if known == "restarted" else {"a": 0.0, "b": 0.0}))
    rendezvous.is_away = known == "away"
    wait(rendezvous, Transfer(0.5), Transfer(1.0))
    assert rendezvous.reads >= 2


def test_a_short_exchange_asks_nobody_and_an_error_is_passed_on() -> None:
    rendezvous = Rendezvous(b=60.0)
    wait(rendezvous, Transfer(0.0))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait(rendezvous, Transfer(0.0, "Connection closed by peer"))
    assert rendezvous.reads == 0
