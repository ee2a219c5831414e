"""How long operations take that take turns, so that what else the machine does meets them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Median time of an operation in seconds, and that time over the first operation's."""

    seconds: float
    ratio: float


def take_turns(
    operations: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_of: Callable[[Callable[[], object]], float],
) -> dict[str, Timing]:
    """Time every operation once a round, after one round that does not count.

    Args:
        operations: by name.
        rounds: that count.
        seconds_of: calls an operation and returns how long it took.
    """
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds + 1):
        for name, operation in operations.items():
            seconds[name].append(seconds_of(operation))

    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    base = next(iter(medians.values()))
    return {name: Timing(median, median / base) for name, median in medians.items()}


def seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from the call to the end of what it makes `device` do."""
    _finish(device)
    start = time.perf_counter()
    operation()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
