"""Alternate the steps of several methods, so that other load on the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.overlap.methods import Method


@dataclass
class Timings:
    """Measurements of one method; lists have one entry per step.

    Attributes:
        seconds: wall-clock time.
        waited: seconds of waiting counted by the ledger; empty for PyTorch and transformers.
        collectives: per step; 0 without a ledger.
        payload_bytes: counted by the ledger per step; 0 without a ledger.
        wire_bytes: sent by the interface; 0 without an interface.
        first_loss: loss before the first step.
    """

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    collectives: int = 0
    payload_bytes: int = 0
    wire_bytes: list[int] = field(default_factory=list)
    first_loss: float = float("nan")


@dataclass(frozen=True)
class Entry:
    """A method in one setting: `prepare` is called before each of its steps."""

    method: Method
    prepare: Callable[[], None] = lambda: None


def run_rounds(
    entries: Mapping[str, Entry],
    tokens: Tensor,
    rounds: int,
    warm_up: int = 2,
    fence: Callable[[], object] = lambda: None,
    sent_bytes: Callable[[], int] = lambda: 0,
) -> dict[str, Timings]:
    """Take one step of each entry per round; the order rotates from round to round.

    Args:
        entries: by name.
        tokens: the batch of all steps, int64 of shape (B, T).
        rounds: measured rounds.
        warm_up: rounds before them.
        fence: a barrier, called around each step.
        sent_bytes: returns the bytes sent so far.
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
    ledger = entry.method.ledger
    before = ledger.totals() if ledger else None
    wire = sent_bytes()
    fence()
    start = time.perf_counter()
    loss = entry.method.step(tokens)
    seconds = time.perf_counter() - start
    fence()  # all data for the peer has left this interface
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
