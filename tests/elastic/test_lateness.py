"""Warnings of replicas that come too late, or whose training waits."""

from __future__ import annotations

import time

import pytest

from lightning_commfree.elastic.lateness import Lateness
from tests.elastic.log_twin import Job, Replica, play
from tests.elastic.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("turns")

LATE = "its messages came too late in the last 3 exchanges"


def test_as_many_late_messages_as_fragments_are_a_warning_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lateness = Lateness(fragments=3, overlap_steps=5)
    for listed in (False, False, True, False, False):
        lateness.listed(listed)
    assert not caplog.messages
    for _ in range(9):
        lateness.listed(False)
    (text,) = caplog.messages
    assert LATE in text
    assert "Raise `overlap_steps` or `grace` on all replicas, use `sync='time'`" in text


@pytest.mark.parametrize(("waits_s", "warns"), [([0.4, 0.4, 0.0], True), ([0.4, 0.0, 0.0], False)])
def test_waits_in_most_flights_are_a_warning_once(
    waits_s: list[float], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lateness = Lateness(fragments=3, overlap_steps=5)
    for flight in range(30):
        lateness.landed(waits_s[flight % 3], 2.0 * flight)
        assert flight >= 8 or not caplog.messages
    assert len(caplog.messages) == warns
    if warns:
        assert "for 0.4 s on average" in caplog.text
        assert "Raise `overlap_steps=5`" in caplog.text


def test_short_waits_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    lateness = Lateness(fragments=3, overlap_steps=0)
    for flight in range(30):
        lateness.landed(0.01, 2.0 * flight)
    assert not caplog.messages


class LateStore(MemoryStore):
    """Stores no message of r1 in the first flights before its commit."""

    def create(self, key: str, data: bytes) -> bool:
        folder, flight, *name = [*key.split("/"), ""]
        end_s = time.monotonic() + 10.0
        while folder == "x" and "r1" in name and int(flight) < 6 and time.monotonic() < end_s:
            if f"commit/{flight}" in self.objects:
                break
            time.sleep(0.01)
        return super().create(key, data)


def test_a_replica_that_is_never_in_time_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"sync_every": 8, "num_fragments": 3, "overlap_steps": 5}
    job = Job(LateStore(), 60, settings, 0.05, step_s=0.01)
    replicas = [Replica(f"r{i}", i, job).start() for i in range(2)]
    play(replicas)
    assert caplog.text.count(LATE) == 1
