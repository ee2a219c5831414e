"""A result page: what was asked and found, with a picture; then how it was made; then tables.

The page of a folder is `result.md` beside its code, and names a commit at which it was made. From a
tree with other changes it is therefore not written there, only elsewhere, for a try-out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes.training.provenance import DIRTY, lines_of

BENCHMARKS = Path(__file__).resolve().parents[1]
UNCOMMITTED = "measured from a tree with changes that nobody kept, on top of"
# what a benchmark writes itself, run by run: a second call must not take it for changed code
RESULTS = [":(exclude)benchmarks/*/*.md", ":(exclude)benchmarks/*/*.png"]
RESULTS += [":(exclude)benchmarks/*/*.json"]


def provenance(question: str, arguments: Sequence[str] | None, page: Path) -> list[str]:
    """Return lines of Markdown that say where figures come from.

    Args:
        question: name of the folder.
        arguments: of the command; None: those of this process.
        page: that is going to be written.

    Raises:
        SystemExit: the page is one of the repository, and tracked files have changes.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"benchmarks.{question}", *words])
    lines = lines_of(command, ignore=RESULTS)
    if page.resolve().is_relative_to(BENCHMARKS) and any(DIRTY in line for line in lines):
        raise SystemExit(
            f"{page} shall name the commit that made it, and the working tree has changes that are"
            " not committed. Commit them, or name a page outside of benchmarks/ for a try-out"
            " (`--page`, or `--results`)."
        )
    return lines


def result_page(
    title: str, opening: Sequence[str], made_by: Iterable[Sequence[str]], body: Sequence[str]
) -> list[str]:
    """Return a page as lines of Markdown.

    Args:
        title: of the page.
        opening: what was asked and found, in a few lines that a stranger understands; the picture.
        made_by: what `provenance` returned to each call that has measured.
        body: method and tables.
    """
    head = [f"# {title}", "", *opening, "", "## Where it comes from", ""]
    return [*head, *one_block(made_by), "", *body]


def one_block(made_by: Iterable[Sequence[str]]) -> list[str]:
    """Return the provenance of several calls as one list: each value once, under its label."""
    found: dict[str, list[str]] = {"command": [], "commit": [], UNCOMMITTED: []}
    for line in (line for block in made_by for line in block):
        label, _, value = line.removeprefix("- ").partition(": ")
        if label == "commit" and DIRTY in value:
            label, value = UNCOMMITTED, value.replace(DIRTY, "")
        found.setdefault(label, []).append(value)

    lines = [
        f"- {label}: {'; '.join(dict.fromkeys(all_))}" for label, all_ in found.items() if all_
    ]
    return [_as_typed_today(line) for line in lines]


def _as_typed_today(line: str) -> str:
    """Return a line with the command that does it now, where the module has moved since."""
    today = line.replace("python -m recipes.bench.", "python -m benchmarks.")
    if today == line:
        return line
    then = dict.fromkeys(re.findall(r"recipes\.bench\.\w+", line))
    return f"{today}; called {', '.join(f'`{name}`' for name in then)} then"


def write_page(path: Path, lines: Sequence[str]) -> None:
    """Write the page and say where it is."""
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
    """Write a PNG with a group of bars for each name, and a colour for each name within.

    Args:
        path: of the picture.
        title: above it.
        unit: of the values.
        groups: by group, by bar: the value. A bar that a group lacks leaves its place empty.
        logarithmic: whether the axis is.
    """
    bars = list(dict.fromkeys(bar for values in groups.values() for bar in values))
    width = 0.8 / max(len(bars), 1)
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which keeps global state and may look for a display
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
