"""Steps of several ways in turn, so that whatever the machine does besides falls on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.overlap.ways import Way


@dataclass
class Timings:
    """What one way did in its steps, one entry a step.

    Attributes:
        seconds: wall-clock.
        waited: seconds of them that the ledger counted as waited; empty for a peer.
        collectives: of a step; 0 for a peer, which has no ledger.
        payload_bytes: that the ledger counted for a step; 0 for a peer.
        wire_bytes: that the interface sent, 0 where there is none.
        first_loss: before the first step.
    """

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    collectives: int = 0
    payload_bytes: int = 0
    wire_bytes: list[int] = field(default_factory=list)
    first_loss: float = float("nan")


@dataclass(frozen=True)
class Entry:
    """A way in one setting: `prepare` is called before each of its steps."""

    way: Way
    prepare: Callable[[], None] = lambda: None


def play_rounds(
    entries: Mapping[str, Entry],
    tokens: Tensor,
    rounds: int,
    warm_up: int = 2,
    fence: Callable[[], object] = lambda: None,
    sent_bytes: Callable[[], int] = lambda: 0,
) -> dict[str, Timings]:
    """Take one step of each entry a round; the order rotates from round to round.

    Args:
        entries: by name.
        tokens: the batch of all steps, int64 of shape (B, T).
        rounds: that are measured.
        warm_up: rounds before them.
        fence: returns when all ranks have come to it; called around each step.
        sent_bytes: what has left the machine so far.
    """
    timings = {name: Timings() for name in entries}
    names = list(entries)
    for round_ in range(warm_up + rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            _step(entries[name], tokens, timings[name], round_, warm_up, fence, sent_bytes)
    return timings


def _step(
    entry: Entry,
    tokens: Tensor,
    timings: Timings,
    round_: int,
    warm_up: int,
    fence: Callable[[], object],
    sent_bytes: Callable[[], int],
) -> None:
    entry.prepare()
    ledger = entry.way.ledger
    before = ledger.totals() if ledger else None
    wire = sent_bytes()
    fence()
    start = time.perf_counter()
    loss = entry.way.step(tokens)
    seconds = time.perf_counter() - start
    fence()  # what the peer waits for has left our interface
    if round_ == 0:
        timings.first_loss = loss
    if round_ < warm_up:
        return
    timings.seconds.append(seconds)
    timings.wire_bytes.append(sent_bytes() - wire)
    if ledger and before:
        after = ledger.totals()
        timings.waited.append(after.seconds_waited - before.seconds_waited)
        timings.collectives = after.collectives - before.collectives
        timings.payload_bytes = after.bytes_sent - before.bytes_sent
