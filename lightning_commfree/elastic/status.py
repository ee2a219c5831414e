"""The state of an elastic job, from its log: the table of `commfree-store status`.

It reads small keys and changes nothing. The rate of the flights is the only time: how many came
between two looks, by this process's clock.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from lightning_commfree.elastic.log import ABSTAINS, LEAVES, Entry, Member
from lightning_commfree.elastic.parts import SEAL_BYTES
from lightning_commfree.stores.store import Store

_WINDOW = 20  # latest flights that are looked at
_RATE_S = 60.0  # time over which the rate is measured
_STEP_AT = SEAL_BYTES + 8  # in a message: the second word of `diloco.exchange.Header`


class Row(NamedTuple):
    """What the log says about a replica."""

    slot: int
    name: str
    last: int | None  # the latest of the flights looked at whose commit lists it
    listed: int  # number of those flights
    message_bytes: float | None  # mean size of its messages in them
    state: str


class Status(NamedTuple):
    """What the log says about a job."""

    flight: int  # latest one with a commit
    step: int | None  # after which that one was launched; None if there is none
    max_steps: int  # -1: no limit
    looked_at: int  # number of flights
    ended: bool
    rows: Sequence[Row]


class JobWatch:
    """Looks at a job's log again and again, and reads each commit once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roster: list[Member] = []
        self._commits: dict[int, dict[str, int]] = {}  # by flight: bytes of a message, by replica
        self._looks: list[tuple[float, int]] = []  # time, and latest flight then

    def look(self) -> Status | None:
        """Return the state of the job, or None if there is no job."""
        config = self._store.get("config")
        if config is None:
            return None
        job = json.loads(config)
        end = self._store.get("end")
        latest = self._latest(job["first"], end)
        window = range(max(job["first"], latest - _WINDOW + 1), latest + 1)
        self._read_commits(window)
        while (data := self._store.get(f"roster/{len(self._roster)}")) is not None:
            self._roster.append(Member(*json.loads(data)))
        self._looks.append((time.monotonic(), latest))
        return Status(
            flight=latest,
            step=self._launch_step(latest),
            max_steps=int(job["settings"].get("max_steps", -1)),
            looked_at=len(self._commits),
            ended=end is not None,
            rows=[self._row(member, latest) for member in self._members()],
        )

    def per_minute(self) -> float | None:
        """Return the rate of the flights in about the last minute; None after only one look."""
        now_s, flight = self._looks[-1]
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= _RATE_S:
            del self._looks[0]
        begin_s, before = self._looks[0]
        return 60.0 * (flight - before) / (now_s - begin_s) if now_s > begin_s else None

    def _latest(self, first: int, end: bytes | None) -> int:
        """Return the number of the latest flight that has a commit."""
        if end is not None:
            return int(end) - 1
        head = self._store.get("head")
        latest = max(first - 1, *self._commits, int(head or first - 1))
        while self._store.get(f"commit/{latest + 1}") is not None:
            latest += 1
        return latest

    def _read_commits(self, window: range) -> None:
        """Read the commits of the flights in `window`, and forget all others."""
        for flight in self._commits.keys() - window:
            del self._commits[flight]
        for flight in window:
            # the last round may leave out numbers
            if flight not in self._commits and (data := self._store.get(f"commit/{flight}")):
                entries = [Entry(*entry) for entry in json.loads(data)]
                self._commits[flight] = {entry.name: entry.size for entry in entries}

    def _launch_step(self, flight: int) -> int | None:
        """Return the step after which a flight was launched; None if its messages are gone."""
        for name in self._commits.get(flight, {}):
            word = self._store.get_range(f"x/{flight}/{name}", _STEP_AT, 8)
            if word is not None:
                return int(struct.unpack("=q", word)[0])
        return None

    def _members(self) -> list[Member]:
        """Return the latest owners of the slots, and who else was listed, by slot."""
        owners = {one.slot: one.name for one in self._roster}
        listed = {name for sizes in self._commits.values() for name in sizes}
        shown = (
            one
            for one in self._roster
            if one.slot >= 0  # not a question
            and (owners[one.slot] == one.name or one.name in listed)
        )
        return sorted(shown, key=lambda one: one.slot)

    def _row(self, member: Member, latest: int) -> Row:
        """Return what is known about a replica."""
        sizes = {f: one[member.name] for f, one in self._commits.items() if member.name in one}
        last = max(sizes, default=None)
        mean = sum(sizes.values()) / len(sizes) if sizes else None
        state = "listed" if last == latest else self._why_not_listed(member.name, last, latest)
        return Row(member.slot, member.name, last, len(sizes), mean, state)

    def _why_not_listed(self, name: str, last: int | None, latest: int) -> str:
        """Return "NaN", "has left" or "late" with its latest flight, or "silent"."""
        oldest = latest - _WINDOW if last is None else last
        for flight in range(latest + 1, oldest, -1):
            begin = self._store.get_range(f"x/{flight}/{name}", 0, 2)
            if begin is not None:
                found = {ABSTAINS: "NaN", LEAVES: "has left"}.get(begin, "late")
                return f"{found}, sent {flight}"
        return "silent"


def table(status: Status, per_minute: float | None = None) -> str:
    """Return a text with the state of a job and a row per replica."""
    steps = "" if status.max_steps == -1 else f" of {status.max_steps}"
    lines = [
        "No exchange has been committed yet"
        if status.step is None
        else f"Exchange {status.flight}, launched after step {status.step}{steps}"
    ]
    if status.ended:
        lines[0] += ". The job has ended."
    elif per_minute is not None:
        lines[0] += f"; {per_minute:.1f} exchanges per minute"
    titles = ["slot", "replica", "last listed", f"in last {status.looked_at}", "behind"]
    titles += ["bytes per exchange", "state"]
    cells = [titles, *(_cells(row, status.flight) for row in status.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cells(row: Row, latest: int) -> list[str]:
    """Return the texts of a line of the table."""
    never = row.last is None
    return [
        str(row.slot),
        row.name,
        "-" if never else str(row.last),
        str(row.listed),
        "-" if row.last is None else str(latest - row.last),
        "-" if row.message_bytes is None else f"{row.message_bytes:,.0f}",
        row.state,
    ]
