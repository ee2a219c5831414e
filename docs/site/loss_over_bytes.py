"""Draw docs/assets/loss_over_bytes.svg from the records of the size ladder.

python -m docs.site.loss_over_bytes
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.size_ladder.page import default_cell, gaps
from benchmarks.size_ladder.records import RECORDS, Records
from commfree_planner import all_reduce_bytes, exchange_bytes, payload_bytes

TARGET = Path(__file__).resolve().parents[2] / "docs/assets/loss_over_bytes.svg"
MODELS = {"gpt2": "GPT-2", "llama": "Llama"}
SIZE = "0.04M"
REPLICAS, SYNC_EVERY = (2, 4), (30, 100)
MANY = 256 * 1024  # numbers; the share of bytes does not depend on how many


class Point(NamedTuple):
    """Streaming DiLoCo with one setting, compared with DDP on the same tokens."""

    model: str
    replicas: int
    sync_every: int
    share: float  # of the bytes that fp32 DDP sends with as many ranks
    gaps: tuple[float, ...]  # percent above DDP's loss, by seed

    @property
    def mean(self) -> float:
        """The mean gap in percent."""
        return statistics.mean(self.gaps)


def share_of_ddp(replicas: int, sync_every: int, wire: str) -> float:
    """Return the bytes per step relative to fp32 DDP, by the formulas of the ledger."""
    ours = exchange_bytes(payload_bytes(MANY, wire), replicas) / sync_every
    return ours / all_reduce_bytes(4 * MANY, replicas)


def points() -> list[Point]:
    """Return the points by model, number of replicas and `sync_every`."""
    losses = Records(RECORDS).losses
    return [
        Point(
            model,
            replicas,
            every,
            share_of_ddp(replicas, every, "fp4"),
            tuple(gaps(losses, default_cell(model, SIZE, replicas, every))),
        )
        for model, replicas, every in product(MODELS, REPLICAS, SYNC_EVERY)
    ]


def description(found: Sequence[Point]) -> str:
    """Return the text in the picture's metadata: every point with its gap and bytes."""
    return "; ".join(
        f"{MODELS[p.model]}, {p.replicas} replicas, H = {p.sync_every}: {p.mean:+.2f} % at"
        f" {p.share:.6f} of the bytes"
        for p in found
    )


def draw(path: Path, found: Sequence[Point]) -> None:
    """Write the picture. The same points give the same file."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.plot(1, 0, "ko", label="DDP")
    for (model, name), replicas in product(MODELS.items(), REPLICAS):
        mine = [p for p in found if (p.model, p.replicas) == (model, replicas)]
        axes.errorbar(
            [p.share for p in mine],
            [p.mean for p in mine],
            [statistics.stdev(p.gaps) for p in mine],
            fmt="o-" if replicas == min(REPLICAS) else "s--",
            color="C0" if model == min(MODELS) else "C1",
            capsize=3,
            label=f"{name}, {replicas} replicas",
        )
    ticks = {1.0: "1"} | {p.share: f"1/{1 / p.share:.0f}\nH = {p.sync_every}" for p in found}
    axes.set(
        xscale="log",
        xlim=(0.0008, 2),
        xlabel="bytes that a rank sends, as a share of fp32 DDP's",
        ylabel="loss above DDP's, %",
    )
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "one", "svg.fonttype": "none"}):
        said = {"Date": None, "Creator": None, "Description": description(found)}
        figure.savefig(path, format="svg", metadata=said)


def main() -> None:
    """Write the picture and print its points."""
    found = points()
    draw(TARGET, found)
    print(description(found).replace("; ", "\n"))


if __name__ == "__main__":
    main()
