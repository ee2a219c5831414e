"""When to look at the store again: rarely while nothing is expected, often while training waits.

Times are those of one process's monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

_GROWTH = 0.25  # pause between two looks, relative to the time since the wait began
PAUSE_S = (0.02, 0.5)  # the shortest and longest one
_EARLY = 0.8  # first look, relative to the shortest recent time after which a look was successful
_WATCH_S = (1.0, 4.0)  # shortest and longest pause between looks for newcomers
_WATCHES = 4  # looks for newcomers between two launches


def first_look_s(recent_s: Iterable[float]) -> float:
    """Return how long after a launch to look first, from how long recent flights have taken.

    Too late a look costs no wait, because a landing that is due looks at once. It must come a
    little early: a flight seems to take at least as long as the first look waits.
    """
    return _EARLY * min(recent_s, default=0.0)


def look_at_s(began_s: float, first_s: float, looked_s: float) -> float:
    """Return when to look: first `first_s` after a wait began, then with growing pauses."""
    if looked_s < began_s + first_s:
        return began_s + first_s
    shortest_s, longest_s = PAUSE_S
    return looked_s + min(max(_GROWTH * (looked_s - began_s), shortest_s), longest_s)


def watch_pause_s(interval_s: float) -> float:
    """Return the pause between looks for newcomers, from the time between two launches.

    The owner of a slot must see in less than 6 s that it is asked whether it is still there.
    """
    shortest_s, longest_s = _WATCH_S
    return min(max(interval_s / _WATCHES, shortest_s), longest_s)
