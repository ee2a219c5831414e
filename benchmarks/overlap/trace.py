"""Record a step as a Chrome trace, and draw a timeline from such traces.

The trace comes from `torch.profiler` and opens in chrome://tracing and ui.perfetto.dev. It contains
named ranges for sublayers ("enter ...", "body ...", "weights ..."), for launches and landings with
direction, layer and micro-batch ("land backward layer 3 mlp #1"), and for gloo's threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.overlap.methods import Method

PHASES = ("forward", "backward", "optimizer")
_PIECE = re.compile(r"(enter|body|weights|land|launch) (?:(forward|backward) )?(.+) #(\d+)")
_COLOURS = {  # by micro-batch
    "attention": ("#1f77b4", "#aec7e8"),
    "mlp": ("#2ca02c", "#98df8a"),
    "embedding": ("#9467bd", "#c5b0d5"),
}
_WEIGHTS = "#e7ba52"
_LANES = ("computing", "waiting", "in flight", "gloo")


@dataclass(frozen=True)
class Span:
    """A range of a trace; times in milliseconds from the start of the step.

    Attributes:
        kind: "enter", "body", "weights", "land" or "launch" of a sublayer; "phase" of the step;
            "transfer" by a thread of gloo.
        direction: "forward" or "backward"; for a phase, its name.
        sublayer: name of the sublayer.
        part: number of the micro-batch.
    """

    kind: str
    start_ms: float
    end_ms: float
    direction: str = ""
    sublayer: str = ""
    part: int = 0


def record(method: Method, tokens: Tensor, path: Path) -> None:
    """Take one step under the profiler and write its Chrome trace."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        method.step(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def spans_of(trace: Mapping[str, Any]) -> list[Span]:
    """Return the named ranges of a step's Chrome trace, sorted by start.

    Raises:
        ValueError: the trace contains no step.
    """
    events = sorted(
        (e for e in trace["traceEvents"] if e.get("ph") == "X" and _is_named(e["name"])),
        key=lambda e: e["ts"],
    )
    origin = next((e["ts"] for e in events if e["name"] == "forward"), None)
    if origin is None:
        raise ValueError("The trace contains no range `forward`, so it is not the trace of a step.")
    return [_span(e["name"], e["ts"] - origin, e["dur"]) for e in events]


def _is_named(name: str) -> bool:
    return name in PHASES or name.startswith("gloo:") or _PIECE.fullmatch(name) is not None


def _span(name: str, start_us: float, duration_us: float) -> Span:
    times = start_us / 1e3, (start_us + duration_us) / 1e3
    if name in PHASES:
        return Span("phase", *times, direction=name)
    if name.startswith("gloo:"):
        return Span("transfer", *times)
    match = _PIECE.fullmatch(name)
    assert match is not None, "only named ranges reach this point"
    kind, direction, sublayer, part = match.groups()
    return Span(kind, *times, direction or "forward", sublayer, int(part))


def flights(spans: Sequence[Span]) -> list[Span]:
    """Return the range from launch to the end of landing of every all-reduce, as "flight"."""
    launched: dict[tuple[str, str, int], float] = {}
    found = []
    for span in spans:
        key = (span.direction, span.sublayer, span.part)
        if span.kind == "launch":
            launched.setdefault(key, span.start_ms)  # the first of several slices
        elif span.kind == "land" and key in launched:
            found.append(Span("flight", launched.pop(key), span.end_ms, *key))
    return found


def draw_timeline(traces: Mapping[str, Sequence[Span]], title: str, path: Path) -> None:
    """Draw a PNG with one panel per trace and a common time axis.

    Args:
        traces: spans by the panel's title.
        title: of the picture.
        path: of the PNG.
    """
    # not pyplot: it keeps global state and may need a display
    figure = Figure(figsize=(14, 0.6 + 2.4 * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, spans) in zip(axes, traces.items(), strict=True):
        _draw_panel(axis, spans)
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("milliseconds from the start of the step")
    figure.suptitle(title)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=8, fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_panel(axis: Axes, spans: Sequence[Span]) -> None:
    for span in spans:
        if span.kind == "phase":
            _bar(axis, span, 0, "0.9")
            axis.axvline(span.end_ms, color="0.6", lw=0.8)
            axis.text(span.start_ms, -0.55, span.direction, fontsize=8, va="bottom")
        elif span.kind in ("enter", "body"):
            _bar(axis, span, 0, _COLOURS[span.sublayer.rsplit(" ", 1)[-1]][span.part % 2])
        elif span.kind == "weights":
            _bar(axis, span, 0, _WEIGHTS)
        elif span.kind == "land":
            _bar(axis, span, 1, "#d62728")
        elif span.kind == "transfer":
            _bar(axis, span, 3, "0.4")
    for span in flights(spans):
        colour = _COLOURS[span.sublayer.rsplit(" ", 1)[-1]][span.part % 2]
        _bar(axis, span, 2 - 0.2 + 0.4 * (span.part % 2), colour, height=0.36)
    axis.set_yticks(range(len(_LANES)), _LANES, fontsize=8)
    axis.set_ylim(len(_LANES) - 0.5, -0.9)


def _bar(axis: Axes, span: Span, lane: float, colour: str, height: float = 0.8) -> None:
    axis.barh(
        lane,
        span.end_ms - span.start_ms,
        height,
        left=span.start_ms,
        color=colour,
        edgecolor="white",
        linewidth=0.2,
    )


def _legend() -> list[Patch]:
    patches = [
        Patch(color=colours[part], label=f"{sublayer} #{part}")
        for sublayer, colours in _COLOURS.items()
        for part in (0, 1)
    ]
    others = [
        (_WEIGHTS, "gradients of weights"),
        ("0.9", "rest of the step"),
        ("#d62728", "waiting for an all-reduce"),
        ("0.4", "in gloo"),
    ]
    return patches + [Patch(color=colour, label=label) for colour, label in others]


def read_trace(path: Path) -> list[Span]:
    """Return the spans of a Chrome trace on disk."""
    return spans_of(json.loads(path.read_text()))
