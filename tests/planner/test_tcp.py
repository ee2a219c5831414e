"""Windows of TCP: slow start by hand, the response functions of RFC 9438, and limits."""

from __future__ import annotations

import math

import pytest

from commfree_planner.tcp import SEGMENT, window_seconds


def test_slow_start_by_hand() -> None:
    """Windows of 10, 20 and 40 segments, then 80 of the 100 that fill the link: 3.8 round trips."""
    bytes_per_s = 100 * SEGMENT  # a round trip takes a second
    found = window_seconds(150 * SEGMENT, bytes_per_s, 0.5, loss=0.0, connections=1, idle=True)
    assert found == pytest.approx(3.8 - 1.5)
    shared = window_seconds(450 * SEGMENT, 3 * bytes_per_s, 0.5, loss=0.0, connections=3, idle=True)
    assert shared == pytest.approx(found), "three connections send a third each"
    busy = window_seconds(150 * SEGMENT, bytes_per_s, 0.5, loss=0.0, connections=1, idle=False)
    assert busy == 0.0, "the window of a busy connection is open"


def test_a_fast_link_is_limited_by_the_buffer() -> None:
    """4 MiB in each round trip, on each connection."""
    for connections in (1, 3):
        size = connections * 2**22 * 100
        found = window_seconds(size, math.inf, 0.1, 0.0, connections, idle=False)
        assert found == pytest.approx(100 * 0.2)


@pytest.mark.parametrize(
    ("round_s", "window"),
    [
        (0.02, math.sqrt(0.53 * 1.7 / (2 * 0.3 * 0.001))),  # as fast as Reno
        (1.0, 1.054 * (1.0 / 0.001) ** 0.75),  # equation 5 of RFC 9438
    ],
)
def test_losses_leave_the_windows_of_the_rfc(round_s, window) -> None:
    segments = 10_000
    seconds = window_seconds(segments * SEGMENT, math.inf, round_s / 2, 0.001, 1, idle=False)
    # two connections are simulated, and the slower one counts
    assert 0.85 * segments / window < seconds / round_s < 1.35 * segments / window


def test_longer_and_worse_links_take_longer() -> None:
    def seconds(latency_s=0.05, loss=0.001, connections=3, idle=True):
        return window_seconds(2e6, 6e6, latency_s, loss, connections, idle)

    assert seconds(loss=0.0) < seconds(loss=0.0005) < seconds() < seconds(loss=0.01)
    assert seconds(latency_s=0.02) < seconds() < seconds(latency_s=0.2)
    assert seconds(connections=15) < seconds()
    assert seconds() == seconds(), "the same at every call"
