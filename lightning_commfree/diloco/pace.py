"""Choose how often fragments are exchanged: `sync_every="auto"`.

Replicas measure their exchanges and steps, and send the figures in the header of the next exchange
of the same fragment. So all replicas know the same figures when that has landed, and `choose_pace`
returns the same pace on all of them. They then change the schedule at the same step.

A collective ends when the slowest message has arrived, and begins when a replica launches. So on
all replicas but the one that launches last, it also contains the wait for the others, and the
shortest time of all replicas is that of the link. An elastic replica waits for nobody while it
sends and reads messages; there, the slowest link counts.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from commfree_planner.pace import choose_pace
from lightning_commfree.comm.ledger import Ledger

_KEPT = 4  # exchanges of a fragment; noise makes their times longer, so the shortest counts
_STEPS = 100  # inner steps whose median counts


class Timing(NamedTuple):
    """Durations for one fragment, in thousandths of an inner step; 0: not measured yet."""

    link: int = 0  # of an exchange
    work: int = 0  # of the training thread, to launch and land the fragment, without waiting


def agreed(timings: Sequence[Timing], together: bool = True) -> Timing:
    """Return the common timing of all replicas; zeros until each of them has measured one.

    `together`: they were measured in collectives, which contain the wait for the others.
    """
    if not all(one.link for one in timings):
        return Timing()
    links = [one.link for one in timings]
    return Timing(min(links) if together else max(links), max(one.work for one in timings))


class Pacer:
    """Measures this replica's exchanges and steps, and keeps what all replicas have agreed on."""

    def __init__(self, least_overlap: int, ledger: Ledger) -> None:
        self._least_overlap, self._ledger = least_overlap, ledger
        self._begun_s: float | None = None  # when the current inner step began
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._working_s: defaultdict[int, float] = defaultdict(float)  # since a fragment landed
        self._measured: defaultdict[int, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )
        self._agreed: dict[int, Timing] = {}
        self._wanted: tuple[int, int] | None = None  # the latest choice

    def step_begins(self) -> None:
        """Start to measure an inner step."""
        self._begun_s = time.perf_counter()

    def step_ends(self) -> None:
        """Record the duration of an inner step."""
        if self._begun_s is not None:
            self._steps_s.append(time.perf_counter() - self._begun_s)

    def skip_step(self) -> None:
        """Leave the time until the next `step_begins` out of the measured steps."""
        self._begun_s = None

    @contextmanager
    def working(self, p: int) -> Iterator[None]:
        """Context manager that adds its block's time, without waits, to fragment `p`'s work."""
        begun_s, waited_s = time.perf_counter(), self._ledger.seconds_waited
        yield
        waited_s = self._ledger.seconds_waited - waited_s
        self._working_s[p] += time.perf_counter() - begun_s - waited_s

    def timing(self, p: int) -> Timing:
        """Return the times measured for fragment `p`, to send with its launch; zeros at first."""
        if not self._steps_s or len(self._measured[p]) < _KEPT:
            return Timing()
        links_s, works_s = zip(*self._measured[p], strict=True)
        step_s = median(self._steps_s)
        return Timing(*(max(round(1e3 * s / step_s), 1) for s in (min(links_s), min(works_s))))

    def landed(self, p: int, link_s: float | None, timing: Timing) -> None:
        """Record this replica's time of an exchange of fragment `p`, and the agreed `timing`.

        All replicas have sent their parts of `timing` with this exchange, about earlier ones.
        """
        work_s = self._working_s.pop(p, 0.0)
        if link_s is not None:
            self._measured[p].append((link_s, work_s))
        if timing.link:
            self._agreed[p] = timing

    def choose(self, sync_every: int, overlap_steps: int, num_fragments: int) -> tuple[int, int]:
        """Return the H and tau to change to.

        They are the current ones until every fragment has been timed and two choices in a row
        agree.
        """
        if len(self._agreed) < num_fragments:
            return sync_every, overlap_steps
        links = [one.link / 1e3 for one in self._agreed.values()]
        work = sum(one.work for one in self._agreed.values()) / 1e3
        before = self._wanted
        self._wanted = choose_pace(links, work, sync_every, overlap_steps, self._least_overlap)
        return self._wanted if self._wanted == before else (sync_every, overlap_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what all replicas know, so that one that joins chooses as the others do."""
        return {"agreed": {p: tuple(t) for p, t in self._agreed.items()}, "wanted": self._wanted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; this replica's own measurements begin anew."""
        self._agreed = {p: Timing(*words) for p, words in state["agreed"].items()}
        self._wanted = state["wanted"]

    def describe(self) -> str:
        """Return a clause with the agreed times of exchanges and of work, for a message."""
        links = sum(one.link for one in self._agreed.values()) / 1e3
        works = sum(one.work for one in self._agreed.values()) / 1e3
        return (
            f"the exchanges of all fragments take {links:.2f} steps, and their work {works:.3f}"
            " steps"
        )
