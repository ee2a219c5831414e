"""The bandwidth that a utilization needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from commfree_planner.dag import Exchange, utilization
from commfree_planner.layer_sums import LayerSums


def log_grid(lowest: float, highest: float, points: int) -> list[float]:
    """Return `points` values from `lowest` to `highest` in equal ratios, both included."""
    ratio = highest / lowest
    return [lowest * ratio ** (i / (points - 1)) for i in range(points)]


def needed_bandwidth(
    layer_seconds: Sequence[float],
    exchange: Exchange | LayerSums,
    target: float,
    grid: Sequence[float],
    latency_s: float = 0.0,
) -> int:
    """Return the index of the grid's first bandwidth that reaches a utilization.

    Args:
        layer_seconds: compute time of each layer in a step.
        exchange: what is sent.
        target: the utilization, in (0, 1).
        grid: bandwidths in Gbit/s, ascending. Utilization does not fall along it.
        latency_s: of the link, one way.

    Returns:
        0 where the lowest reaches it already, `len(grid)` where none does.

    Raises:
        ValueError: the target is outside (0, 1).
    """
    if not 0 < target < 1:
        raise ValueError(
            f"a target utilization of {target} is not strictly between 0 and 1: 1 needs an infinite"
            " bandwidth. Give a share, for example 0.95."
        )

    def reached(gbit_per_s: float) -> float:
        return utilization(layer_seconds, exchange, gbit_per_s, latency_s)

    return bisect_left(grid, target, key=reached)
