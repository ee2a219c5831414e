"""Draw docs/assets/loss_over_bytes.svg from the saved losses of two benchmarks.

python -m docs.site.loss_over_bytes
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from commfree_planner import all_reduce_bytes, exchange_bytes, payload_bytes

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/assets/loss_over_bytes.svg"
MODEL = "gpt2_tiny"
DEFAULTS = {"outer_lr": 0.4, "momentum": 0.9, "mix": 0.5}
SEEDS = 3
MANY = 256 * 1024  # numbers; the share of bytes does not depend on how many


class Point(NamedTuple):
    """One setting, with a loss per seed."""

    name: str
    share: float  # of the bytes that fp32 DDP sends with as many ranks
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean loss."""
        return statistics.mean(self.losses)


def share_of_ddp(replicas: int, sync_every: int, wire: str) -> float:
    """Return the bytes per step relative to fp32 DDP, by the formulas of the ledger."""
    ours = exchange_bytes(payload_bytes(MANY, wire), replicas) / sync_every
    return ours / all_reduce_bytes(4 * MANY, replicas)


def points() -> list[Point]:
    """Return DDP, and Streaming DiLoCo with its defaults for several replicas and `sync_every`."""
    ddp = _losses("quality", {"model": MODEL, "wire": "none"})
    found = [Point("DDP", 1.0, ddp)]
    for replicas in (2, 4):
        for every in (30, 100):
            wanted = {"model": MODEL, "wire": "fp4", "replicas": replicas, "sync_every": every}
            losses = _losses("last_round", {**wanted, **DEFAULTS, "last_round": "mean"})
            name = f"{replicas} replicas, H = {every}"
            found.append(Point(name, share_of_ddp(replicas, every, "fp4"), losses))
    return found


def _losses(benchmark: str, wanted: dict[str, Any]) -> tuple[float, ...]:
    """Return the losses of the one learning rate that was run with all seeds."""
    text = (ROOT / "benchmarks" / benchmark / "result.json").read_text("utf-8")
    by_rate: dict[float, list[float]] = {}
    for kept in json.loads(text)["runs"]:
        if wanted.items() <= kept["run"].items():
            by_rate.setdefault(kept["run"]["lr"], []).append(kept["validation_loss"])
    (losses,) = (found for found in by_rate.values() if len(found) == SEEDS)
    return tuple(losses)


def description(found: Sequence[Point]) -> str:
    """Return the text in the picture's metadata: every point with its loss and bytes."""
    return "; ".join(f"{p.name}: {p.mean:.4f} at {p.share:.6f} of the bytes" for p in found)


def draw(path: Path, found: Sequence[Point]) -> None:
    """Write the picture. The same points give the same file."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for point in found:
        spread = statistics.stdev(point.losses)
        axes.errorbar(point.share, point.mean, spread, fmt="o", capsize=3)
        label = point.name if point.share == 1 else f"{point.name}: 1/{1 / point.share:.0f}"
        left = point.share == 1
        axes.annotate(
            label,
            (point.share, point.mean),
            xytext=(-8 if left else 8, 4),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=9,
        )
    axes.set(
        xscale="log",
        xlim=(0.0008, 2),
        xlabel="bytes that a rank sends, as a share of fp32 DDP's",
        ylabel="validation loss, nats per token",
    )
    axes.grid(alpha=0.3)
    with mpl.rc_context({"svg.hashsalt": "one", "svg.fonttype": "none"}):
        said = {"Date": None, "Creator": None, "Description": description(found)}
        figure.savefig(path, format="svg", metadata=said)


def main() -> None:
    """Write the picture and print its points."""
    found = points()
    draw(TARGET, found)
    for point in found:
        above = 100 * (point.mean / found[0].mean - 1)
        print(f"{point.name}: {point.mean:.4f} ({above:+.2f} %), 1/{1 / point.share:.0f} of DDP")


if __name__ == "__main__":
    main()
