"""Time that a message takes on TCP connections with latency and loss, round trip by round trip.

In every round trip a connection sends one window of segments. The window starts at 10 segments
(RFC 6928) and doubles until a segment is lost, or until the link is full. After a loss it follows
CUBIC (RFC 9438), the default of Linux. A connection that was idle starts from 10 segments again,
and doubles up to three quarters of its former window at least (RFC 2861). The message has arrived
when the slowest of the connections is done.

BBR neither slows down after a single loss nor starts again after a pause: predict it without both.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

SEGMENT = 1448  # bytes of data in a packet of 1500 bytes
_FIRST = 10.0  # segments
_LARGEST = 2**22 / SEGMENT  # segments; Linux buffers 4 MiB per connection by default (tcp_wmem)
_CUT, _C = 0.7, 0.4  # beta and C of RFC 9438
_MESSAGES = 6  # simulated one after the other; the first one, on new connections, does not count
_MOST_CONNECTIONS, _MOST_ROUNDS = 24, 400  # simulated; the rest is extrapolated


@lru_cache(maxsize=2**14)
def window_seconds(
    num_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    loss: float,
    connections: int,
    idle: bool,
) -> float:
    """Return how much longer the windows make a message than the link alone would.

    Args:
        num_bytes: bytes of the message, sent by one replica.
        bytes_per_s: of the replica's link; may be infinite.
        latency_s: of the link, one way; positive.
        loss: share of the packets that are lost, in [0, 1).
        connections: of the replica; they share the message and the link equally.
        idle: whether the connections are idle before the message.
    """
    segments = num_bytes / connections / SEGMENT
    full = bytes_per_s / connections * 2 * latency_s / SEGMENT  # a link's window, in segments
    round_s, alone_s = 2 * latency_s, num_bytes / bytes_per_s
    if not loss and not idle:
        return max(0.0, segments / min(full, _LARGEST) * round_s - alone_s)

    rng = random.Random(0)
    # the replicas' connections; with one each, they form a ring or a pair
    count = min(connections * (connections + 1), _MOST_CONNECTIONS) if loss else 1
    flows = [_Connection(min(full, _LARGEST), loss, rng) for _ in range(count)]
    seconds = []
    for _ in range(_MESSAGES if loss else 1):
        seconds.append(round_s * max(flow.rounds(segments, round_s) for flow in flows))
        if idle:
            for flow in flows:
                flow.idle()
    counted = seconds[1:] or seconds
    return max(0.0, sum(counted) / len(counted) - alone_s)


class _Connection:
    """One direction of a connection: its window, in segments.

    Args:
        full: the window that fills its share of the link.
        loss: share of the packets that are lost.
        rng: decides about each round trip.
    """

    def __init__(self, full: float, loss: float, rng: random.Random) -> None:
        self._full, self._loss, self._rng = full, loss, rng
        self._window, self._threshold = _FIRST, math.inf
        self._most = max(2 * full, _FIRST)  # a larger window would only fill the queue
        self._peak = 0.0  # window at the last loss, W_max
        self._start = _FIRST  # window after it
        self._since_s, self._reno = 0.0, 0.0  # time since then, and the window of Reno

    def rounds(self, segments: float, round_s: float) -> float:
        """Send `segments`; return the number of round trips, without the last one's latency."""
        rounds, left = 0.0, segments
        while True:
            sent = min(self._window, self._full)
            if left <= sent:
                return rounds + left / self._full
            if not self._loss and sent == self._full:
                return rounds + left / self._full
            rounds += 1
            left -= sent
            if self._rng.random() < 1 - (1 - self._loss) ** sent:
                left += min(1.0, sent / 2)
                self._cut()
            else:
                self._grow(round_s)
            if rounds == _MOST_ROUNDS:
                return rounds * segments / (segments - left)

    def idle(self) -> None:
        """Forget the window after a pause, but not how far it may double."""
        self._threshold = max(self._threshold, 0.75 * self._window)
        self._window = min(self._window, _FIRST)

    def _grow(self, round_s: float) -> None:
        """Grow the window after a round trip of `round_s` without loss."""
        if self._window < self._threshold:
            self._window = min(2 * self._window, self._threshold, self._most)
            self._start_cubic()
            return
        self._since_s += round_s
        self._reno += 1.0 if self._reno >= self._peak else 3 * (1 - _CUT) / (1 + _CUT)
        peak = max(self._peak, self._start)
        inflection_s = ((peak - self._start) / _C) ** (1 / 3)
        cubic = _C * (self._since_s - inflection_s) ** 3 + peak
        self._window = min(max(cubic, self._reno), self._most)

    def _cut(self) -> None:
        """Shrink the window after a loss."""
        # a peak below the last one makes room for other connections (fast convergence)
        shrinks = self._window < self._peak
        self._peak = self._window * ((1 + _CUT) / 2 if shrinks else 1.0)
        self._window = self._threshold = max(2.0, _CUT * self._window)
        self._start_cubic()

    def _start_cubic(self) -> None:
        """Let CUBIC's growth start from the present window."""
        self._since_s, self._start, self._reno = 0.0, self._window, self._window
