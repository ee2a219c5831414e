"""What `benchmarks.overlap` makes of the times of single steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Rows = Mapping[str, Mapping[str, Any]]  # `Timings` as plain values, by row


def slower(nodes: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return, step by step, the largest value of `key` among the nodes."""
    return [max(values) for values in zip(*(node[key] for node in nodes), strict=True)]


def share_hidden(none_s: float, sync_s: float, domino_s: float) -> float:
    """Return which share of the synchronous step's communication is gone from Domino's."""
    return (sync_s - domino_s) / (sync_s - none_s)


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return 1e3 * statistics.median(seconds)


def spread_ms(seconds: Sequence[float]) -> str:
    """Return first and third quartile in milliseconds."""
    if len(seconds) < 2:
        return "-"
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{1e3 * low:.1f} to {1e3 * high:.1f}"


class Medians(NamedTuple):
    """Milliseconds of a step without communication, synchronous, and with Domino."""

    none: float
    sync: float
    domino: float

    @property
    def share(self) -> float:
        """Share of the synchronous step that is communication."""
        return 1 - self.none / self.sync

    @property
    def hidden(self) -> float:
        """Share of that communication that Domino hides."""
        return share_hidden(self.none, self.sync, self.domino)

    @property
    def speed(self) -> float:
        """Domino's speed over the synchronous one."""
        return self.sync / self.domino


def merged(nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of one shape of all nodes as one.

    A step takes as long as on the slower node; its waiting is the mean, for a node that comes late
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
    """Return the medians of one share."""
    names = ("none", f"sync@{share}", f"batch@{share}")
    return Medians(*(median_ms(rows[name]["seconds"]) for name in names))


def medians(rows: Rows) -> Medians | None:
    """Return the medians of one shape in the laboratory; None if a row is missing."""
    if not {"none", "sync", "batch"} <= rows.keys():
        return None
    return Medians(*(median_ms(rows[name]["seconds"]) for name in ("none", "sync", "batch")))
