"""Medians of the step times of `benchmarks.overlap`, and the share hidden."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Rows = Mapping[str, Mapping[str, Any]]  # `Timings` as plain values, by row


def slower(nodes: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the largest value of `key` among the nodes, for every step."""
    return [max(values) for values in zip(*(node[key] for node in nodes), strict=True)]


def share_hidden(none_s: float, sync_s: float, domino_s: float) -> float:
    """Return the share of the synchronous step's communication that Domino hides."""
    return (sync_s - domino_s) / (sync_s - none_s)


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return 1e3 * statistics.median(seconds)


def spread_ms(seconds: Sequence[float]) -> str:
    """Return the first and third quartile in milliseconds."""
    if len(seconds) < 2:
        return "-"
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{1e3 * low:.1f} to {1e3 * high:.1f}"


class Medians(NamedTuple):
    """Median milliseconds of a step without communication, synchronous, and with Domino."""

    none: float
    sync: float
    domino: float

    @property
    def share(self) -> float:
        """Share of communication in the synchronous step."""
        return 1 - self.none / self.sync

    @property
    def hidden(self) -> float:
        """Share of that communication that Domino hides."""
        return share_hidden(self.none, self.sync, self.domino)

    @property
    def speed(self) -> float:
        """Domino's speed relative to synchronous."""
        return self.sync / self.domino


def merged(nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merge the rows of all nodes for one shape.

    The time of a step is that of the slower node. Its waiting time is the mean, because a late node
    makes the other one wait.
    """
    rows = {}
    for name in nodes[0]["rows"]:
        each = [node["rows"][name] for node in nodes]
        waits = zip(*(node["waited"] for node in each), strict=True)
        rows[name] = {
            **each[0],
            "seconds": slower(each, "seconds"),
            "waited": [statistics.mean(step) for step in waits],
        }
    return rows


def mechanism_medians(rows: Rows, share: str) -> Medians:
    """Return the medians for one simulated link."""
    names = ("none", f"sync@{share}", f"batch@{share}")
    return Medians(*(median_ms(rows[name]["seconds"]) for name in names))


def medians(rows: Rows) -> Medians | None:
    """Return the medians of one shape in the laboratory; None if a row is missing."""
    if not {"none", "sync", "batch"} <= rows.keys():
        return None
    return Medians(*(median_ms(rows[name]["seconds"]) for name in ("none", "sync", "batch")))
