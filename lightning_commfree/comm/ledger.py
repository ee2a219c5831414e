"""Count the bytes that this rank sends and the seconds that it waits for collectives.

Every collective in the package is counted here when it is launched, under a *tag* for its purpose.
Traffic forecasts use the same formulas: the bytes that *one rank* sends, averaged over the ranks of
the group, for the algorithms that gloo and nccl use at the message sizes that matter (n ranks, a
payload of b bytes per rank):

============== ======================= ====================================================
collective     bytes sent by a rank    why
============== ======================= ====================================================
all-reduce     2 b (n - 1) / n         ring: reduce-scatter, all-gather; b/n per message
all-gather     b (n - 1)               ring: every block visits every other rank once
all-to-all     b (n - 1) / n           a rank's block for itself is not sent
broadcast      b (n - 1) / n           n - 1 ranks receive b each
============== ======================= ====================================================

Bytes and seconds are also counted by *phase* of the fit, so that training steps can be measured
separately: before the first step (`START`), training steps (`STEPS`), validation (`VALIDATION`),
checkpoints and the last exchange (`END`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

START, STEPS, VALIDATION, END = "start", "steps", "validation", "end"
PHASES = (START, STEPS, VALIDATION, END)


def ring_all_reduce_bytes(num_bytes: int, size: int) -> int:
    """Return how many bytes each of `size` ranks sends in an all-reduce of `num_bytes`."""
    return 2 * num_bytes * (size - 1) // size


def all_gather_bytes(num_bytes: int, size: int) -> int:
    """Return how many bytes each of `size` ranks sends in an all-gather of `num_bytes` per rank."""
    return num_bytes * (size - 1)


def all_to_all_bytes(num_bytes: int, size: int) -> int:
    """Return how many bytes each of `size` ranks sends in an all-to-all of `num_bytes` per rank."""
    return num_bytes * (size - 1) // size


def broadcast_bytes(num_bytes: int, size: int) -> int:
    """Return how many bytes a rank sends in a broadcast of `num_bytes`, averaged over the ranks."""
    return num_bytes * (size - 1) // size


class LedgerTotals(NamedTuple):
    """A ledger's totals at one point in time; the difference of two is the traffic in between."""

    bytes_sent: int
    seconds_waited: float
    collectives: int


@dataclass
class Ledger:
    """Records how many bytes this rank sends and how many seconds it waits, by tag.

    Waiting time is the time during which the caller is blocked, in `Pending.wait` or in a blocking
    collective. On a CUDA device, it counts only while the device has nothing else to compute.
    """

    bytes_by_tag: Counter[str] = field(default_factory=Counter)
    seconds_by_tag: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    collectives_by_tag: Counter[str] = field(default_factory=Counter)
    phase: str = START  # one of `PHASES`; the strategy sets it
    follows: Ledger | None = None  # a ledger whose phase this one uses
    bytes_by_phase: defaultdict[str, Counter[str]] = field(  # by phase, then by tag
        default_factory=lambda: defaultdict(Counter)
    )
    seconds_by_phase: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _idle_threads: set[int] = field(default_factory=set, repr=False, compare=False)
    _phase_by_thread: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    _device_waits: deque[tuple[str, str, Callable[[], float | None]]] = field(
        default_factory=deque, repr=False, compare=False
    )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, over all tags."""
        return sum(list(self.bytes_by_tag.values()))  # another thread may add a tag

    @property
    def seconds_waited(self) -> float:
        """Seconds that this rank has waited for collectives, over all tags."""
        return sum(list(self.seconds_by_tag.values()))

    @property
    def collectives(self) -> int:
        """Number of collectives that this rank has launched, over all tags."""
        return sum(list(self.collectives_by_tag.values()))

    def totals(self) -> LedgerTotals:
        """Return this rank's current totals over all tags."""
        return LedgerTotals(self.bytes_sent, self.seconds_waited, self.collectives)

    def bytes_in(self, phase: str) -> int:
        """Return how many bytes this rank has sent in a phase."""
        return sum(list(self.bytes_by_phase[phase].values()))

    def count_sent(self, tag: str, num_bytes: int) -> None:
        """Count a collective under `tag`, and the `num_bytes` that this rank sends in it."""
        self.bytes_by_tag[tag] += num_bytes
        self.bytes_by_phase[self._current_phase()][tag] += num_bytes
        self.collectives_by_tag[tag] += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context manager that attributes traffic during its block to `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def thread_phase(self, phase: str) -> Iterator[None]:
        """Context manager that attributes the calling thread's traffic during its block to `phase`.

        For example, a background thread may still be sending a step's payload during validation.
        """
        thread = threading.get_ident()
        self._phase_by_thread[thread] = phase
        try:
            yield
        finally:
            del self._phase_by_thread[thread]

    def ignore_waits_of_this_thread(self) -> None:
        """Stop counting the calling thread's waits, because they do not block training."""
        self._idle_threads.add(threading.get_ident())

    @contextmanager
    def count_wait(self, tag: str) -> Iterator[None]:
        """Context manager that counts the duration of its block as waiting time under `tag`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if threading.get_ident() not in self._idle_threads:
                self._add_wait(tag, self._training_phase(), time.perf_counter() - start)

    def count_device_wait(self, tag: str, read_seconds: Callable[[], float | None]) -> None:
        """Note that a device waits for a collective; `settle` asks `read_seconds` for how long.

        `read_seconds` returns None while the device has not finished waiting. The host is not
        blocked. Waits on threads that `ignore_waits_of_this_thread` has marked are left out.
        """
        if threading.get_ident() not in self._idle_threads:
            self._device_waits.append((tag, self._training_phase(), read_seconds))
            self.settle()

    def settle(self) -> None:
        """Add finished device waits to the totals; they finish in the order in which they began."""
        while self._device_waits:
            tag, phase, read_seconds = self._device_waits[0]
            waited = read_seconds()
            if waited is None:
                return
            self._add_wait(tag, phase, waited)
            self._device_waits.popleft()

    def _add_wait(self, tag: str, phase: str, seconds: float) -> None:
        self.seconds_by_tag[tag] += seconds
        self.seconds_by_phase[phase] += seconds

    def _training_phase(self) -> str:
        """Return the phase in which the training thread is."""
        # not `_current_phase`: only the training thread's waits are counted
        return self.phase if self.follows is None else self.follows.phase

    def _current_phase(self) -> str:
        """Return the calling thread's phase (`thread_phase`) or, by default, training's."""
        if self.follows is not None:
            return self.follows._current_phase()
        return self._phase_by_thread.get(threading.get_ident(), self.phase)


@dataclass(frozen=True)
class Traffic:
    """Forecast of one rank's traffic during training steps, computed with the ledger's formulas."""

    bytes_by_tag: Mapping[str, float]  # per cycle
    cycle_steps: int  # number of steps after which the pattern of exchanges repeats
    ddp_bytes_per_step: float  # with fp32 DDP, for the same model and ranks

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that one rank sends per cycle, over all tags."""
        return round(sum(self.bytes_by_tag.values()))

    @property
    def bytes_per_step(self) -> float:
        """Bytes that one rank sends per step, averaged over a cycle."""
        return self.bytes_per_cycle / self.cycle_steps


class StepMeans:
    """Mean bytes and wait time per training step (phase `STEPS`) over the latest complete cycles.

    `at_least` is the minimum number of steps to average over, rounded up to complete cycles.
    """

    def __init__(self, ledger: Ledger, traffic: Traffic, at_least: int) -> None:
        self._ledger, self._ddp_bytes = ledger, traffic.ddp_bytes_per_step
        cycles = -(-at_least // traffic.cycle_steps)
        # the means over n steps need n + 1 sums
        self._window = deque([self._sums()], maxlen=cycles * traffic.cycle_steps + 1)
        self.steps = 0

    def after_step(self) -> None:
        """Record the ledger's totals after a training step."""
        self.steps += 1
        self._window.append(self._sums())

    def figures(self) -> dict[str, float]:
        """Return the means by metric name, such as "comm/exposed_ms"; empty before any step."""
        if not self.steps:
            return {}
        (bytes_before, seconds_before), (bytes_now, seconds_now) = self._window[0], self._window[-1]
        steps = len(self._window) - 1
        sent = (bytes_now - bytes_before) / steps
        figures = {
            "comm/bytes_per_step": sent,
            "comm/exposed_ms": 1e3 * (seconds_now - seconds_before) / steps,
        }
        if sent:  # do not divide by zero
            figures["comm/compression"] = self._ddp_bytes / sent
        return figures

    def _sums(self) -> tuple[int, float]:
        """Return the bytes sent and the seconds waited in all training steps so far."""
        self._ledger.settle()
        return self._ledger.bytes_in(STEPS), self._ledger.seconds_by_phase[STEPS]
