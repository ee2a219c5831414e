"""Result pages: question, finding and picture first; then provenance; then tables.

The page of a folder is `result.md` next to its code, and names the commit that made it. With
uncommitted changes a page can therefore only be written elsewhere, as a trial.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from recipes.training.provenance import DIRTY, lines_of

BENCHMARKS = Path(__file__).resolve().parents[1]
# written by the benchmark itself after each run: must not count as changed code in a second call
RESULTS = [":(exclude)benchmarks/*/*.md", ":(exclude)benchmarks/*/*.png"]
RESULTS += [":(exclude)benchmarks/*/*.json", ":(exclude)benchmarks/*/*.jsonl"]


def provenance(question: str, arguments: Sequence[str] | None, page: Path) -> list[str]:
    """Return Markdown lines with the command, commit, hardware and versions.

    Args:
        question: name of the folder.
        arguments: of the command; None takes those of this process.
        page: that will be written.

    Raises:
        SystemExit: the page is in the repository and tracked files have changes.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"benchmarks.{question}", *words])
    lines = lines_of(command, ignore=RESULTS)
    if page.resolve().is_relative_to(BENCHMARKS) and any(DIRTY in line for line in lines):
        raise SystemExit(
            f"{page} must name the commit that made it, but the working tree has uncommitted"
            " changes. Commit them, or write a trial page outside of benchmarks/ (`--page`, or"
            " `--results`)."
        )
    return lines


def result_page(
    title: str, opening: Sequence[str], made_by: Iterable[Sequence[str]], body: Sequence[str]
) -> list[str]:
    """Return a page as Markdown lines.

    Args:
        title: of the page.
        opening: question, finding and picture, understandable on their own.
        made_by: result of `provenance` for each call that measured.
        body: method and tables.
    """
    head = [f"# {title}", "", *opening, "", "## Provenance", ""]
    return [*head, *one_block(made_by), "", *body]


def one_block(made_by: Iterable[Sequence[str]]) -> list[str]:
    """Merge the provenance of several calls: each distinct value once, under its label."""
    found: dict[str, list[str]] = {}
    for line in (line for block in made_by for line in block):
        label, _, value = line.removeprefix("- ").partition(": ")
        found.setdefault(label, []).append(value)
    return [f"- {label}: {'; '.join(dict.fromkeys(all_))}" for label, all_ in found.items()]


def write_page(path: Path, lines: Sequence[str]) -> None:
    """Write the page and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}")


def draw_bars(
    path: Path,
    title: str,
    unit: str,
    groups: Mapping[str, Mapping[str, float]],
    logarithmic: bool = False,
) -> None:
    """Write a PNG with groups of bars, one colour per bar name.

    Args:
        path: of the PNG.
        title: of the picture.
        unit: of the values.
        groups: values by group and bar. A bar missing from a group leaves a gap.
        logarithmic: use a logarithmic axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = list(dict.fromkeys(bar for values in groups.values() for bar in values))
    width = 0.8 / max(len(bars), 1)
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    axes = figure.subplots()

    for shift, bar in enumerate(bars):
        places = [place for place, values in enumerate(groups.values()) if bar in values]
        heights = [values[bar] for values in groups.values() if bar in values]
        drawn = axes.bar([p + width * shift for p in places], heights, width, label=bar)
        texts = [f"{height:,.0f}" if height >= 100 else f"{height:.3g}" for height in heights]
        axes.bar_label(drawn, texts, fontsize=6, padding=1)

    middle = width * (len(bars) - 1) / 2
    axes.set_xticks([place + middle for place in range(len(groups))], list(groups), fontsize=8)
    axes.set(ylabel=unit, title=title)
    if logarithmic:
        axes.set_yscale("log")
    if len(bars) > 1:
        figure.legend(fontsize=7, loc="outside right upper")  # beside the bars, not over them
    figure.savefig(path, dpi=120)
