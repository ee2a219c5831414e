"""Figures of a run, from the logs of its processes.

*Useful*: a replica's step whose contribution the surviving replicas have, or will get with the next
exchange. Of a process that lives at the end of the run, all steps are useful that its method has
not discarded; of one that died, those that others had by then (`Row.kept`):

- under torchrun's restarts, steps up to the checkpoint;
- under DiLoCo, steps up to the launch that has landed. A step is in each fragment, and fragments
  are exchanged in turn, so it counts in proportion to the fragments that have it.

*Available*: the time in which a replica could have trained. A replica is out from an event that
hits it until it is ready again. It is ready when its new process has built the model, or, if its
process survives SIGSTOP or a partition, at the end of that. All other time is available: pauses of
the others, their restarts, and what a new process does between building the model and its first
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

from benchmarks.chaos.events import CUT, MEETING, STOP, Event
from benchmarks.chaos.plan import Process, Row

Curve = Sequence[tuple[float, float]]  # seconds and validation loss
Logs = Mapping[int, Sequence[Process]]
_SURVIVES_S = 5.0  # after SIGCONT or a partition: some methods then end the process
_STILL_STEPS = 3  # a longer time without a step is a pause
_SMOOTH = 3  # checkpoints in the moving mean of the loss


class Window(NamedTuple):
    """The time of a run in which all is counted, in seconds since the epoch."""

    begun_s: float  # the last replica has taken its first step
    ended_s: float

    @property
    def seconds(self) -> float:
        """Length."""
        return self.ended_s - self.begun_s


def useful_steps(logs: Logs, window: Window, alive: AbstractSet[int]) -> float:
    """Return the useful steps of all replicas in a window.

    Args:
        logs: of all processes.
        window: of the run.
        alive: ids of the processes that lived at its end.
    """
    total = 0.0
    for process in (one for replica in logs.values() for one in replica):
        before = _last(process.rows, window.begun_s)
        last = _last(process.rows, window.ended_s)
        value = last.useful if process.pid in alive else last.kept
        total += max(0.0, value - before.useful)
    return total


def outages(logs: Logs, events: Sequence[Event], window: Window) -> dict[int, list[Window]]:
    """Return the times in which each replica is out, without overlap and in order.

    Args:
        logs: of all processes.
        events: that took place.
        window: of the run; times after its end are left out.
    """
    found: dict[int, list[Window]] = {replica: [] for replica in logs}
    for event in sorted(events):
        if event.kind == MEETING:
            continue
        out = found[event.replica]
        begins = window.begun_s + event.at_s
        ends = min(_ready_s(logs[event.replica], event, begins, window.ended_s), window.ended_s)
        if out and begins < out[-1].ended_s:
            out[-1] = Window(out[-1].begun_s, max(ends, out[-1].ended_s))
        elif begins < ends:
            out.append(Window(begins, ends))
    return found


def _ready_s(processes: Sequence[Process], event: Event, begins: float, last_s: float) -> float:
    """Return when the replica that an event has hit is ready again; `last_s` if never."""
    over = begins + event.lasts_s
    hit = [one for one in processes if one.rows[0].at_s <= begins][-1:]
    if event.kind in (STOP, CUT) and any(
        one.rows[-1].at_s >= min(over + _SURVIVES_S, last_s - _SURVIVES_S) for one in hit
    ):
        return over
    return min((one.rows[0].at_s for one in processes if one.rows[0].at_s > begins), default=last_s)


def all_out(out: Mapping[int, Sequence[Window]]) -> bool:
    """Return whether all replicas are out at the same time: without a file, all is lost."""
    begins = [one.begun_s for replica in out.values() for one in replica]
    return any(
        all(any(w.begun_s <= at < w.ended_s for w in replica) for replica in out.values())
        for at in begins
    )


def available_s(out: Mapping[int, Sequence[Window]], window: Window) -> float:
    """Return the seconds in which replicas could have trained, all replicas together."""
    lost = sum(one.seconds for replica in out.values() for one in replica)
    return len(out) * window.seconds - lost


def gaps(
    logs: Logs, out: Mapping[int, Sequence[Window]], window: Window
) -> Iterator[tuple[int, float]]:
    """Yield replica and seconds from each of its steps to its next one, while it is not out."""
    for replica, processes in logs.items():
        times = [row.at_s for one in processes for row in one.rows[1:]]
        inside = sorted(at for at in times if window.begun_s <= at <= window.ended_s)
        for before, after in pairwise([window.begun_s, *inside, window.ended_s]):
            if not any(one.begun_s < after and before < one.ended_s for one in out[replica]):
                yield replica, after - before


def longest_standstill(logs: Logs, out: Mapping[int, Sequence[Window]], window: Window) -> float:
    """Return the longest time in seconds from one step of a replica to its next, while not out."""
    return max((seconds for _, seconds in gaps(logs, out, window)), default=0.0)


class Losses(NamedTuple):
    """Where available replica-seconds go, all replicas together."""

    joining_s: float  # new processes, between building the model and their first step
    still_s: float  # pauses between two steps, beyond the time of a step
    unsent_s: float  # steps that a process had not sent when it ended


def losses(
    logs: Logs,
    out: Mapping[int, Sequence[Window]],
    window: Window,
    alive: AbstractSet[int],
    rate: float,
) -> Losses:
    """Return where the available seconds of a run go.

    Args:
        logs: of all processes.
        out: when each replica is out.
        window: of the run.
        alive: ids of the processes that lived at its end.
        rate: steps per second and replica, undisturbed.
    """
    joining_s = unsent_s = 0.0
    for process in (one for replica in logs.values() for one in replica):
        begun_s = process.rows[0].at_s
        first_s = min([*(row.at_s for row in process.rows[1:2]), window.ended_s])
        if window.begun_s < begun_s < window.ended_s:
            joining_s += first_s - begun_s
        if process.pid not in alive:
            last = _last(process.rows, window.ended_s)
            unsent_s += (last.useful - last.kept) / rate
    still_s = sum(s - 1 / rate for _, s in gaps(logs, out, window) if s > _STILL_STEPS / rate)
    return Losses(joining_s, still_s, unsent_s)


def moving_mean(curve: Curve) -> list[tuple[float, float]]:
    """Return the means of seconds and loss over neighbouring checkpoints."""
    parts = [curve[i : i + _SMOOTH] for i in range(len(curve) - _SMOOTH + 1)]
    return [(_mean(s for s, _ in part), _mean(loss for _, loss in part)) for part in parts]


def seconds_to(curve: Curve, target: float) -> float | None:
    """Return the seconds until the moving mean of the loss reaches a target; None if it does not.

    Interpolates between neighbouring means.
    """
    means = moving_mean(curve)
    for i, (seconds, loss) in enumerate(means):
        if loss <= target:
            if i == 0:
                return seconds
            before_s, before = means[i - 1]
            return before_s + (seconds - before_s) * (before - target) / (before - loss)
    return None


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _last(rows: Sequence[Row], at_s: float) -> Row:
    """Return the last row up to a time; an empty one if there is none."""
    return max((row for row in rows if row.at_s <= at_s), default=Row(at_s, 0, 0.0, 0.0))


class Commits:
    """Counts the useful steps of a process whose method may discard some.

    Args:
        parts: number of fragments.
        delay: steps from a fragment's launch to its commit.
    """

    def __init__(self, parts: int, delay: int) -> None:
        self.steps = 0
        self._delay, self._lost = delay, 0.0
        self._sent = [0] * parts  # steps in the last commit of each fragment

    @property
    def useful(self) -> float:
        """Steps that were not discarded."""
        return self.steps - self._lost

    @property
    def kept(self) -> float:
        """Of these, those that the other replicas have."""
        return self.useful - sum(self.steps - sent for sent in self._sent) / len(self._sent)

    def synced(self, part: int, committed: bool) -> None:
        """Count the sync of a fragment; if it was not committed, its steps are discarded."""
        if committed:
            self._sent[part] = max(self._sent[part], self.steps - self._delay)
        else:
            self._lost += (self.steps - self._sent[part]) / len(self._sent)
            self._sent[part] = self.steps

    def replaced(self) -> None:
        """Count that another replica's state has replaced the steps since the last commits."""
        for part in range(len(self._sent)):
            self.synced(part, committed=False)
