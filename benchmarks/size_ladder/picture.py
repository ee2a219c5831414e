"""Picture of the size ladder: the gap to DDP over what it depends on."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.size_ladder.cells import (
    BLOCK,
    CHOSEN,
    MODELS,
    Cell,
    Losses,
    pairs,
    percent,
    reference,
    row,
    with_own_rate,
)
from benchmarks.size_ladder.records import Records

COLORS = {1: "C0", 2: "C1", 4: "C2", 8: "C3"}  # by M
MARKERS = dict(zip(MODELS, ("o", "s"), strict=True))
# arXiv:2503.09799 at 35M, 20 tokens per parameter: M -> percent above DDP
PAPER = {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9}
PAPER_BATCH = 2**16  # tokens
_PAPER_STEPS = 20 * 35e6 / PAPER_BATCH


class Point(NamedTuple):
    """The mean over the seeds of a setting."""

    cell: Cell
    percent: float  # above DDP

    @property
    def tokens(self) -> int:
        """Tokens of a replica in a step."""
        return self.cell.blocks * BLOCK // self.cell.replicas


def points(losses: Losses) -> Iterator[Point]:
    """Yield the settings that were run with the default outer step, fp4 and AdamW."""
    cells = {replace(cell, seed=1, rung=0) for cell in losses if cell.replicas}
    for cell in sorted(cells, key=str):
        if cell == cell.default and cell.wire == "fp4" and cell.optimizer == "adamw":
            rates = (with_own_rate, row)
            both = (pairs(losses, cell, reference(cell), with_rate) for with_rate in rates)
            if runs := next(filter(None, both), None):
                yield Point(cell, statistics.mean(percent(losses, *each) for each in runs))


def longer_runs(losses: Losses) -> list[list[Point]]:
    """Return settings by length of the run, shortest first; those that were run once are alone."""
    found: defaultdict[Cell, list[Point]] = defaultdict(list)
    for point in points(losses):
        found[replace(point.cell, tokens_per_parameter=0)].append(point)
    return [sorted(group, key=lambda point: point.cell.steps) for group in found.values()]


def draw_page(records: Records, path: Path) -> None:
    """Draw the gap over steps, and over tokens of a replica in a step, as a PNG."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    left, right = figure.subplots(1, 2, sharey=True)
    found = longer_runs(records.losses)
    _draw(left, found, lambda point: point.cell.steps)
    _draw(right, found, lambda point: point.tokens)
    for m, gap in PAPER.items():
        left.plot(_PAPER_STEPS, gap, "x", color=COLORS[m])
        right.plot(PAPER_BATCH / m, gap, "x", color=COLORS[m])
    left.set(xlabel="steps", ylabel="loss above DDP (%)")
    right.set(xlabel="tokens of a replica in a step")
    for m, color in COLORS.items():
        left.plot([], [], "o", color=color, label=f"M = {m}")
    for model, marker in MARKERS.items():
        left.plot([], [], marker, color="0.5", label=model)
    left.plot([], [], "x", color="0.5", label="paper, 35M")
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, found: list[list[Point]], place: Callable[[Point], float]) -> None:
    """Draw the points, and lines between runs that differ in length only."""
    axes.axhline(0, color="0.7")
    axes.set_xscale("log")
    for group in found:
        cell = group[0].cell
        axes.plot(
            [place(point) for point in group],
            [point.percent for point in group],
            f"{MARKERS[cell.model]}-",
            color=COLORS[cell.replicas],
            fillstyle="full" if cell.sync_every <= CHOSEN else "none",
            linewidth=0.8,
            markersize=5,
        )
