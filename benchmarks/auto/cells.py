"""The links and models, and what is measured of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_UTILIZATION = 0.99


class Cell(NamedTuple):
    """A fit of two replicas on two nodes of the laboratory."""

    size: str  # of `benchmarks.bandwidth.job.WORKLOADS`
    rate: str  # of both links
    other: str | None = None  # of the second node's link, if it differs
    later: str | None = None  # of both links in the second half of the fit
    round_trip_ms: float = 0.0

    @property
    def name(self) -> str:
        """Words for the page."""
        words = f"{self.size}, {self.rate}"
        if self.other:
            words += f" and {self.other}"
        if self.later:
            words += f", later {self.later}"
        if self.round_trip_ms:
            words += f", {self.round_trip_ms:g} ms"
        return words


CELLS = (
    *(Cell(size, rate) for size in ("0.19M", "5.8M") for rate in ("20mbit", "100mbit", "1gbit")),
    Cell("5.8M", "5mbit"),
    Cell("5.8M", "100mbit", round_trip_ms=50.0),
    Cell("5.8M", "100mbit", other="20mbit"),
    Cell("5.8M", "1gbit", later="5mbit"),
    Cell("5.8M", "5mbit", later="1gbit"),
)


class Measured(NamedTuple):
    """What one node has measured."""

    paces: list[tuple[int, int, int]]  # of `diloco.schedule.Pace`
    step_s: list[float]  # seconds of each step
    blocked_s: list[float]  # of these, in which Streaming DiLoCo blocked training


class Figures(NamedTuple):
    """What is found of a cell."""

    paces: list[tuple[int, int, int]]  # until half of the fit, and until its end
    first: float  # utilization before the first choice
    last: float | None  # in the whole cycles after the last change; None: there are none
    last_steps: int  # in these cycles


def figures_of(nodes: Sequence[Measured]) -> Figures:
    """Return the figures of a cell: of the node that computes most.

    The other node's steps are shorter, so it also waits for this one, whatever H is.
    """
    paces = [tuple(pace) for pace in nodes[0].paces]
    assert all([tuple(pace) for pace in node.paces] == paces for node in nodes), "they choose alike"
    steps = len(nodes[0].step_s)
    # the first cycle after a change still has messages of the one before
    begins = paces[-1][0] + paces[-1][1]
    cycles = max(steps - begins, 0) // paces[-1][1]
    last = slice(begins, begins + cycles * paces[-1][1])
    first = slice(paces[0][1], paces[1][0] if len(paces) > 1 else steps)
    return Figures(
        [(int(a), int(b), int(c)) for a, b, c in paces],
        max(utilization(node, first) for node in nodes),
        max(utilization(node, last) for node in nodes) if cycles > 0 else None,
        last.stop - last.start,
    )


def utilization(node: Measured, steps: slice) -> float:
    """Return the share of some steps' time in which training was not blocked."""
    return 1.0 - sum(node.blocked_s[steps]) / sum(node.step_s[steps])


def table(found: Sequence[tuple[Cell, Figures]]) -> list[str]:
    """Return the figures of all cells as Markdown lines."""
    lines = [
        "| model, link | H and tau, from which step on | computing before the first choice |"
        " after the last change | in steps | at least 99 % |",
        "|---|---|---|---|---|---|",
    ]
    for cell, one in found:
        paces = ", ".join(f"{h} and {tau} from {begins + 1}" for begins, h, tau in one.paces)
        last = "not measured" if one.last is None else f"{one.last:.2%}"
        lines.append(
            f"| {cell.name} | {paces} | {one.first:.1%} | {last} | {one.last_steps} |"
            f" {'met' if is_met(one) else 'missed'} |"
        )
    return lines


def is_met(one: Figures) -> bool:
    """Return whether a cell keeps the bound."""
    return one.last is not None and one.last >= LEAST_UTILIZATION
