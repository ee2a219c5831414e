"""Timing of operations that take turns, so that other load on the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Median time of an operation in seconds, and its ratio to the first operation's."""

    seconds: float
    ratio: float


def take_turns(
    operations: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds_of: Callable[[Callable[[], object]], float],
) -> dict[str, Timing]:
    """Time every operation once per round.

    Args:
        operations: by name.
        rounds: measured rounds, after one warm-up round.
        seconds_of: calls an operation and returns its duration.
    """
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds + 1):
        for name, operation in operations.items():
            seconds[name].append(seconds_of(operation))

    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    base = next(iter(medians.values()))
    return {name: Timing(median, median / base) for name, median in medians.items()}


def seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of an operation, including its work on `device`."""
    _synchronize(device)
    start = time.perf_counter()
    operation()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
