"""Warn about settings with which a replica is never in time, or training waits all the time."""

from __future__ import annotations

import logging
from collections import deque

_log = logging.getLogger(__name__)

_LEAST_FLIGHTS = 8  # whose waits are compared with the time between landings
_LEAST_LATE = 2  # messages in a row
_LONG = 0.05  # a wait, relative to the time between two landings


class Lateness:
    """Follows the landings of the flights in which one replica has sent a message.

    Args:
        fragments: number of fragments.
        overlap_steps: that setting, for a warning.
    """

    def __init__(self, fragments: int, overlap_steps: int) -> None:
        self._fragments, self._overlap_steps = fragments, overlap_steps
        self._left_out = 0  # messages in a row
        self._waits: deque[tuple[float, bool]] = deque(maxlen=max(2 * fragments, _LEAST_FLIGHTS))
        self._landed_s: float | None = None
        self._said_late = self._said_slow = False

    def listed(self, listed: bool) -> None:
        """Note whether the commit lists the message, and warn once if it never does."""
        self._left_out = 0 if listed else self._left_out + 1
        if self._left_out < max(self._fragments, _LEAST_LATE) or self._said_late:
            return
        self._said_late = True
        _log.warning(
            "The steps of this replica do not reach the others: its messages came too late in the"
            " last %d exchanges. Its steps are kept, and count as soon as a message is in time."
            " Raise `overlap_steps` or `grace` on all replicas, use `sync='time'`, or give this"
            " replica a smaller batch.",
            self._left_out,
        )

    def landed(self, waited_s: float, now_s: float) -> None:
        """Note how long training waited for a landing, and warn once if it mostly waits long."""
        if self._landed_s is not None:
            self._waits.append((waited_s, waited_s > _LONG * (now_s - self._landed_s)))
        self._landed_s = now_s
        long_s = [seconds for seconds, is_long in self._waits if is_long]
        if len(self._waits) < (self._waits.maxlen or 0) or self._said_slow:
            return
        if 2 * len(long_s) > len(self._waits):
            self._said_slow = True
            _log.warning(
                "Training waited in %d of the last %d exchanges, for %.2g s on average, until the"
                " messages of all replicas were there. Raise `overlap_steps=%d` on all replicas, so"
                " that it covers this time. If the others are slower than this replica, give them a"
                " smaller batch, or use `sync='time'`.",
                len(long_s),
                len(self._waits),
                sum(long_s) / len(long_s),
                self._overlap_steps,
            )
