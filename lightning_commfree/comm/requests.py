"""Requests that travel with the next exchange, for every algorithm alike.

During training, no rank asks the others whether they want to stop. It puts its wish into the header
of the next exchange that is due anyway, and every rank acts on the union of all wishes when that
exchange has landed, which is after the same step on all ranks. They ask each other only then, once,
before they stop (`Stopping.agree_after_step` in `fit/stopping.py`), and where all of them meet
anyway (`Stopping.agree_here`): after a validation, when an epoch ends and, if replicas drift apart,
before a save.
"""

from __future__ import annotations

from collections.abc import Callable

STOP = 1  # stop after the step in which this exchange lands
STREAM_ENDS = 2  # the sender's data, of unknown length, ends with this step


class Requests:
    """One rank's requests; `outgoing` returns this rank's own, as bits.

    An algorithm calls `outgoing` whenever it writes a header, on any thread, so it must not block.
    """

    def __init__(self, outgoing: Callable[[], int] = int) -> None:  # `int` returns 0
        self.outgoing = outgoing
        self._landed = 0

    def incoming(self, bits: int) -> None:
        """Record the union of all members' requests, when an exchange lands."""
        self._landed |= bits

    @property
    def stops(self) -> bool:
        """Whether a landed exchange contained a `STOP` that has not been taken yet."""
        return bool(self._landed & STOP)

    def take(self) -> int:
        """Return the requests that have landed since the last call, as bits, and clear them."""
        landed, self._landed = self._landed, 0
        return landed


def union(bits: list[int]) -> int:
    """Return the union of several ranks' requests, which are bits."""
    result = 0
    for each in bits:
        result |= each
    return result
