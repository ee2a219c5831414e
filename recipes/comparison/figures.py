"""The four figures of a comparison: together as a PNG, and one by one as SVG for the page."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from lightning_commfree.comm.text import plain
from recipes.comparison.outcome import Measured, Outcome, Times, times, tokens
from recipes.training.progress import History

_COLORS = ("#333333", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_COMPUTING, _HIDDEN, _EXPOSED = "#d9d9d9", "#86c5ea", "#c8443a"  # parts of a run's duration


def color(place: int) -> str:
    """Return the color of the strategy with this index."""
    return _COLORS[place % len(_COLORS)]


def draw_loss_over_tokens(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw validation loss over tokens; of short runs, training loss."""
    for name, shade, measured in _curves(outcomes):
        summary, history = measured
        validated = history.validation_steps, history.validation_loss
        steps, losses = validated if _has_curve(history) else (history.steps, history.train_loss)
        _draw_loss(axes, tokens(history, steps), losses, summary.tokens, measured, name, shade)
    axes.set_title("Loss over tokens")
    _label_tokens(axes)
    _finish_loss(axes)


def draw_loss_over_seconds(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw validation loss over the seconds since the first batch; of short runs, training loss."""
    for name, shade, measured in _curves(outcomes):
        summary, history = measured
        validated = history.validation_seconds, history.validation_loss
        x, losses = validated if _has_curve(history) else (history.seconds, history.train_loss)
        _draw_loss(axes, x, losses, summary.seconds, measured, name, shade)
    axes.set(title="Loss over wall-clock", xlabel="seconds since the first batch")
    _finish_loss(axes)


def draw_bytes(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw the bytes that rank 0 sent in steps over tokens; dashed where they are computed."""
    most = 0
    for name, shade, (summary, history) in _curves(outcomes):
        done = [step - history.first_step for step in history.steps]
        x = [*tokens(history, done), summary.tokens]
        y = [*history.bytes_sent, summary.bytes_in_steps]
        style = "-" if summary.bytes_are_counted else "--"
        axes.plot(x, y, style, color=shade, label=name)
        most = max(most, summary.bytes_in_steps)
    if most > 0:
        axes.set_yscale("log", nonpositive="mask")  # strategies differ by orders of magnitude
    axes.set(title="Bytes sent by one rank in steps", ylabel="sum so far")
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    _label_tokens(axes)
    axes.grid(color="0.92")
    _legend(axes)


def draw_times(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw a bar per run: computing, computing with hidden communication, waiting."""
    good = [outcome for outcome in outcomes if outcome.measured is not None]
    for row, outcome in enumerate(good):
        spent = times(outcome)
        exposed, hidden = spent.exposed or 0.0, spent.hidden or 0.0
        computing = max(spent.total - exposed - hidden, 0.0)
        left = 0.0
        for width, shade in ((computing, _COMPUTING), (hidden, _HIDDEN), (exposed, _EXPOSED)):
            axes.barh(row, width, left=left, color=shade, height=0.5)
            left += width
        axes.text(0, row - 0.32, _label(spent), va="bottom", fontsize="small", color="0.25")
    axes.set_yticks(range(len(good)), [outcome.job.name for outcome in good])
    axes.set_ylim(len(good) - 0.5, -1.0)  # the first run on top, below the legend
    axes.set(title="Where the seconds of a run went", xlabel="seconds")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    parts = [("computing", _COMPUTING), ("hidden", _HIDDEN), ("exposed", _EXPOSED)]
    if all(times(outcome).hidden is None for outcome in good):
        del parts[1]
    handles = [Patch(color=shade, label=label) for label, shade in parts]
    axes.legend(handles=handles, ncols=3, frameon=False, fontsize="small", loc="upper right")


DRAWINGS: dict[str, Callable[[Axes, Sequence[Outcome]], None]] = {
    "Validation loss over the tokens trained on": draw_loss_over_tokens,
    "Validation loss over wall-clock time": draw_loss_over_seconds,
    "Bytes that one rank's training steps have sent, over tokens": draw_bytes,
    "Time computing, hidden and exposed, by strategy": draw_times,
}


def write_png(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Write all four figures as one PNG."""
    # without pyplot, which keeps global state and may look for a display
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    for axes, draw in zip(figure.subplots(2, 2).flat, DRAWINGS.values(), strict=True):
        _draw(axes, draw, outcomes)
    figure.savefig(path, dpi=130)


def svg(draw: Callable[[Axes, Sequence[Outcome]], None], outcomes: Sequence[Outcome]) -> str:
    """Return one figure as SVG without fonts, legible on a phone."""
    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    FigureCanvasSVG(figure)
    _draw(figure.subplots(), draw, outcomes)
    file = io.StringIO()
    # without a date and with fixed ids, so that equal figures give equal files
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "comparison"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw(
    axes: Axes,
    draw: Callable[[Axes, Sequence[Outcome]], None],
    outcomes: Sequence[Outcome],
) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, outcomes)


def _curves(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, Measured]]:
    """Yield the name, color and measurements of the successful runs."""
    for place, outcome in enumerate(outcomes):
        if outcome.measured is not None:
            yield outcome.job.name, color(place), outcome.measured


def _has_curve(history: History) -> bool:
    """Return whether a run has several validations; a short one has only the last."""
    return len(history.validation_loss) > 1


def _draw_loss(
    axes: Axes,
    x: Sequence[float],
    losses: Sequence[float],
    end: float,
    measured: Measured,
    name: str,
    shade: str,
) -> None:
    if not _has_curve(measured.history):
        name += ", training"
    # the reference is wide and pale, because another curve may cover it
    first = not axes.lines
    look = {"lw": 5, "alpha": 0.35} if first else {"lw": 1.5, "marker": "o", "ms": 3}
    axes.plot(x, losses, color=shade, label=name, **look)
    # not joined to the curve: validations during training may use fewer batches
    axes.plot([end], [measured.summary.validation_loss], "*", color=shade, ms=10)


def _label_tokens(axes: Axes) -> None:
    axes.set_xlabel("tokens, all ranks together")
    axes.xaxis.set_major_formatter(EngFormatter())


def _finish_loss(axes: Axes) -> None:
    axes.set_ylabel("validation loss, nats per token")
    axes.grid(color="0.92")
    _legend(axes)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:  # there is no legend without a successful run
        axes.legend(frameon=False, fontsize="small")


def _label(spent: Times) -> str:
    if spent.exposed is None:
        return f"{plain(spent.total)} s; exposed: not measured"
    hidden = "not known" if spent.hidden is None else f"at least {plain(spent.hidden)} s"
    total, exposed = plain(spent.total), plain(spent.exposed)
    return f"{total} s, of which exposed {exposed} s; hidden {hidden}"
