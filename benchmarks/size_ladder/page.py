"""Result page of the size ladder, made from its records: text, tables and figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.page import result_page
from benchmarks.common.runs import MISSING, mean_text
from benchmarks.size_ladder.cells import (
    BLOCK,
    LONG,
    MODELS,
    NAMES,
    OUTER,
    OVERLAP,
    REPLICAS,
    SEARCHED,
    SHORT,
    SIZES,
    VOCABULARY,
    Cell,
    Losses,
    lr_of,
    reference,
    row,
    search,
)
from benchmarks.size_ladder.corpus import RECIPE
from benchmarks.size_ladder.records import Records

TITLE = "How far is the loss of Streaming DiLoCo from DDP's, and does the gap shrink with size?"
TARGETS = {2: 0.5, 4: 1.5, 8: 2.5}  # percent above DDP at the largest size, H = 100
WIRE_TARGET = 0.3  # percent, fp4 above fp32
RUNS = 3 * len(MODELS)  # three seeds of each model
SIGMAS = 2.0  # a difference counts if it exceeds so many standard errors
# arXiv:2501.18512, Tables 5 and 6 (C4, 20 tokens per parameter, FP4 with overlap), loss by millions
# of parameters: DDP; (M, H): (2, 30), (2, 100), (4, 30), (4, 100)
PAPER = {
    35: (3.51, 3.53, 3.56, 3.60, 3.64),
    100: (3.19, 3.21, 3.22, 3.25, 3.29),
    200: (2.97, 2.98, 3.00, 3.02, 3.05),
    300: (2.80, 2.81, 2.83, 2.84, 2.87),
    500: (2.67, 2.67, 2.69, 2.70, 2.73),
    1000: (2.49, 2.48, 2.50, 2.50, 2.53),
}
PAPER_CELLS = ((2, 30), (2, 100), (4, 30), (4, 100))
SUCCESS = f"""\
Written down before the first run:

- *Targets.* At the largest size measured with three seeds, with H = 100 and {SHORT} tokens per
  parameter, the mean gap to DDP over both models is at most +0.5, +1.5 and +2.5 % for M = 2, 4, 8.
- *Trend.* For each M, the gap (mean over models and seeds) at the largest size measured with three
  seeds, minus that at the smallest. It "shrinks" or "grows" if the difference exceeds {SIGMAS:.0f}
  standard errors, otherwise it is "flat".
- *Resolution.* s is the standard deviation of the gap over seeds, pooled over all cells with
  several seeds. A gap over n runs differs from 0 if it exceeds {SIGMAS:.0f} s/sqrt(n), and two gaps
  differ if they are {SIGMAS:.0f} s sqrt(2/n) apart.
- *Wire.* fp4 costs at most {WIRE_TARGET} % against fp32."""
HOW_TO_READ = f"""\
Validation loss in nats per token over the whole validation split, of the weights with which a fit
ends (the mean of the replicas' weights). The gap is the percent above the DDP run of the same seed,
which takes the same tokens in the same steps; ± is the standard deviation over seeds. Settings are
the defaults of `StreamingDiLoCoStrategy`, with the overlap of the bandwidth page ({OVERLAP}).
"Outer step" is the gap if the fit ended with an outer step instead of the mean. Replicas are played
in one process by the library's own code, bit for bit equal to separate processes
(`tests/benchmarks/test_size_ladder.py`)."""


def page_lines(records: Records, picture: str) -> list[str]:
    """Return the page as Markdown lines."""
    losses = records.losses
    body = [
        "## What counts as success",
        "",
        *SUCCESS.splitlines(),
        "",
        "## The runs",
        "",
        *_corpus(),
        f"- a byte-level BPE with {VOCABULARY} tokens, trained on the training text; blocks of"
        f" {BLOCK} tokens",
        "",
        *_sizes(),
        "",
        *HOW_TO_READ.splitlines(),
        "",
        "## Gap by size, M and H",
        "",
        *_table(records, [cell for cell in _cells(losses) if cell.wire == "fp4"]),
        "",
        "## Other wires",
        "",
        *_wires(losses),
        "",
        "## Other settings of the outer step",
        "",
        *_outer(records),
        "",
        "## The paper's models",
        "",
        "arXiv:2501.18512, Tables 5 and 6: C4, 20 tokens per parameter, FP4 with overlap.",
        "",
        *_paper(),
        "",
        "## Learning rates",
        "",
        "Validation loss with seed 1, H = 100. The best rate has a worse one on both sides and is"
        " used by all runs of its model, size and M. A larger size takes those of the one before,"
        " divided by 1.4 for each doubling of the width.",
        "",
        *_lr_table(losses),
    ]
    return result_page(TITLE, opening(losses, picture), records.made_by, body)


# -- gaps


def default_cell(model: str, size: str, replicas: int, sync_every: int = 100) -> Cell:
    """Return a cell of the short runs with default settings; seed and learning rate are open."""
    return Cell(model, size, 1, 0, replicas, sync_every)


def gaps(losses: Losses, cell: Cell) -> list[float]:
    """Return the percent above DDP of every seed that has been run, of a cell with open rate."""
    found = []
    for seed in sorted({run.seed for run in losses}):
        ours = row(losses, replace(cell, seed=seed))
        theirs = row(losses, reference(replace(cell, seed=seed)))
        if ours is not None and theirs is not None and {ours, theirs} <= losses.keys():
            found.append(100 * (losses[ours] / losses[theirs] - 1))
    return found


def of_both(losses: Losses, size: str, replicas: int, sync_every: int = 100) -> list[float]:
    """Return the gaps of both models and all seeds."""
    return [
        gap
        for model in MODELS
        for gap in gaps(losses, default_cell(model, size, replicas, sync_every))
    ]


def pooled_deviation(losses: Losses) -> float | None:
    """Return s, the standard deviation of a gap over seeds, pooled over all cells."""
    groups = [found for cell in _cells(losses) if len(found := gaps(losses, cell)) > 1]
    if not groups:
        return None
    squares = sum((len(found) - 1) * statistics.variance(found) for found in groups)
    return math.sqrt(squares / sum(len(found) - 1 for found in groups))


def complete_sizes(losses: Losses, replicas: int) -> list[str]:
    """Return the sizes at which M replicas were run with H = 100, both models and three seeds."""
    return [size for size in NAMES if len(of_both(losses, size, replicas)) >= RUNS]


def trend(losses: Losses, replicas: int) -> tuple[str, float, float] | None:
    """Return the verdict, the difference in percent, and its standard error; None: too few runs."""
    sizes, s = complete_sizes(losses, replicas), pooled_deviation(losses)
    if len(sizes) < 2 or s is None:
        return None
    small, large = (of_both(losses, size, replicas) for size in (sizes[0], sizes[-1]))
    difference = statistics.mean(large) - statistics.mean(small)
    error = s * math.sqrt(1 / len(small) + 1 / len(large))
    if abs(difference) <= SIGMAS * error:
        return "flat", difference, error
    return ("shrinks" if difference < 0 else "grows"), difference, error


# -- text


def opening(losses: Losses, picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        "Replicas that exchange every 100 steps may end with a higher loss than data parallelism on"
        " the same tokens. How much higher, and is it less for larger models?",
        "",
    ]
    lines += [_finding(losses, m) for m in REPLICAS]
    s = pooled_deviation(losses)
    if s is not None:
        lines.append(
            f"- One run's gap has a standard deviation of s = {s:.2f} %. With three seeds of two"
            f" models, gaps above {SIGMAS * s / math.sqrt(RUNS):.2f} % differ from 0, and"
            f" differences above {SIGMAS * s * math.sqrt(2 / RUNS):.2f} % are resolved."
        )
    return [*lines, "", f"![gap to DDP over model size]({picture})"]


def _finding(losses: Losses, replicas: int) -> str:
    """Return the gap of M replicas by size, and the verdicts that the runs so far allow."""
    complete = complete_sizes(losses, replicas)
    texts = []
    for size in NAMES:
        found = of_both(losses, size, replicas)
        if found:
            cycles = [Cell(model, size, 1, 0).steps // 100 for model in MODELS]
            runs = "" if size in complete else f"; {len(found)} of {RUNS} runs, no verdict"
            gap = mean_text(found, "+.2f", " %")
            texts.append(f"{gap} at {size} ({min(cycles)} cycles of H{runs})")
    if not texts:
        return f"- M = {replicas}: not run yet."
    line = f"- **Found, M = {replicas}, H = 100:** {', '.join(texts)} from DDP."
    if complete and replicas in TARGETS:
        largest = statistics.mean(of_both(losses, complete[-1], replicas))
        told = "met" if largest <= TARGETS[replicas] else "missed"
        line += f" Target at {complete[-1]}, +{TARGETS[replicas]} %: {told}."
    found_trend = trend(losses, replicas)
    if found_trend is not None:
        verdict, difference, error = found_trend
        line += f" The gap {'is flat' if verdict == 'flat' else verdict} with size"
        line += f" ({difference:+.2f} ± {error:.2f} points)."
    return line


def _corpus() -> list[str]:
    recipe = json.loads(RECIPE.read_text())
    train, validation = (recipe[name] for name in ("train", "validation"))
    packages = ", ".join(
        f"{package['name']} {package['version']} ({package['license']})"
        for package in recipe["packages"]
    )
    return [
        f"- text: the documentation in Debian's {packages}, by"
        f" `python -m benchmarks.size_ladder.corpus`: {train['bytes'] / 1e6:.1f} MB in"
        f" {train['documents']:,} documents for training, {validation['bytes'] / 1e6:.1f} MB in"
        f" {validation['documents']:,} for validation; SHA-256 of the training text"
        f" {train['sha256'][:16]}"
    ]


def _sizes() -> list[str]:
    lines = [
        "| size | model | parameters | width | layers | tokens per step |"
        f" steps (cycles of H = 100), {SHORT} tokens per parameter | {LONG} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        for model in MODELS:
            cells = (Cell(model, name, 1, 0, tokens_per_parameter=long) for long in (SHORT, LONG))
            steps = [f"{cell.steps:,} ({cell.steps // 100})" for cell in cells]
            lines.append(
                f"| {name} | {model} | {size.parameters(model):,} | {size.width} | {size.layers}"
                f" | {size.blocks * BLOCK:,} | {' | '.join(steps)} |"
            )
    return lines


def _cells(losses: Losses) -> list[Cell]:
    """Return the measured DiLoCo cells with default outer step, seed 1 and open learning rate."""
    found = {replace(cell, seed=1, rung=0) for cell in losses if cell.replicas}
    defaults = [cell for cell in found if cell == cell.default]
    # the searches have other rates than the table
    shown = [cell for cell in defaults if gaps(losses, cell)]
    return sorted(shown, key=_order)


def _order(cell: Cell) -> tuple[int | str | float, ...]:
    place = NAMES.index(cell.size), cell.tokens_per_parameter, cell.sync_every, cell.replicas
    return *place, cell.model, cell.optimizer, cell.wire, *cell.outer


def _table(records: Records, cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| size | tokens per parameter | H | M | model | optimizer | seeds | DDP | DiLoCo | gap |"
        " outer step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_row(records, cell) for cell in cells]


def _row(records: Records, cell: Cell) -> str:
    losses = records.losses
    found = gaps(losses, cell)
    seeds = [replace(cell, seed=seed) for seed in range(1, len(found) + 1)]
    ours = [run for seed in seeds if (run := row(losses, seed)) in losses]
    theirs = [run for seed in seeds if (run := row(losses, reference(seed))) in losses]
    pairs = zip(ours, theirs, strict=True)
    outer = [100 * (records.outer_step[run] / losses[ddp] - 1) for run, ddp in pairs]
    return (
        f"| {cell.size} | {cell.tokens_per_parameter} | {cell.sync_every} | {cell.replicas}"
        f" | {cell.model} | {cell.optimizer} | {len(found)}"
        f" | {mean_text([losses[run] for run in theirs], '.4f')}"
        f" | {mean_text([losses[run] for run in ours], '.4f')}"
        f" | {mean_text(found, '+.2f', ' %')} | {mean_text(outer, '+.2f', ' %')} |"
    )


def _wires(losses: Losses) -> list[str]:
    lines = [
        "| size | H | M | model | wire | gap | fp4 against it |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in _cells(losses):
        if cell.wire != "fp4":
            fp4, theirs = gaps(losses, replace(cell, wire="fp4")), gaps(losses, cell)
            more = [a - b for a, b in zip(fp4, theirs, strict=False)]
            lines.append(
                f"| {cell.size} | {cell.sync_every} | {cell.replicas} | {cell.model} | {cell.wire}"
                f" | {mean_text(theirs, '+.2f', ' %')} | {mean_text(more, '+.2f', ' %')} |"
            )
    return lines if len(lines) > 2 else ["Not run yet."]


def _outer(records: Records) -> list[str]:
    losses = records.losses
    found = {replace(cell, seed=1, rung=0) for cell in losses if cell.replicas}
    changed = [cell for cell in found if cell != cell.default]
    lines = [
        f"| size | tokens per parameter | H | M | model | {', '.join(OUTER)} | gap |"
        " less than the defaults' |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(changed, key=_order):
        gap = gaps(losses, cell)
        usual = gaps(losses, cell.default)
        less = [a - b for a, b in zip(usual, gap, strict=False)]
        lines.append(
            f"| {cell.size} | {cell.tokens_per_parameter} | {cell.sync_every} | {cell.replicas}"
            f" | {cell.model} | {', '.join(map(str, cell.outer))}"
            f" | {mean_text(gap, '+.2f', ' %')} | {mean_text(less, '+.2f', ' %')} |"
        )
    return lines if len(lines) > 2 else ["Not run yet."]


def _paper() -> list[str]:
    names = [f"M = {m}, H = {every}" for m, every in PAPER_CELLS]
    lines = [f"| parameters | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for millions in PAPER:
        texts = [f"{gap:+.1f} %" for gap in _paper_gaps(millions)]
        lines.append(f"| {millions}M | {' | '.join(texts)} |")
    return lines


def _paper_gaps(millions: int) -> list[float]:
    ddp, *others = PAPER[millions]
    return [100 * (loss / ddp - 1) for loss in others]


def _lr_table(losses: Losses) -> list[str]:
    lines = ["| size | model | method | learning rate: loss | best |", "|---|---|---|---|---|"]
    for size, model, m in product(SEARCHED, MODELS, (0, *REPLICAS)):
        cell = Cell(model, size, 1, 0, m)
        if losses.keys().isdisjoint(search(losses, cell)):
            continue
        best = row(losses, cell)
        lines.append(
            f"| {size} | {model} | {f'M = {m}' if m else 'DDP'}"
            f" | {_rates(losses, search(losses, cell))}"
            f" | {MISSING if best is None else lr_of(best.rung)} |"
        )
    return lines


def _rates(losses: Losses, cells: Sequence[Cell]) -> str:
    tried = sorted(cells, key=lambda cell: cell.rung)
    texts = [
        f"{lr_of(cell.rung)}: {losses[cell]:.4f}" if cell in losses else f"{lr_of(cell.rung)}: -"
        for cell in tried
    ]
    return ", ".join(texts) or MISSING


# -- figure


def draw_page(records: Records, path: Path) -> None:
    """Draw the gap over model size as a PNG, ours and the paper's."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    axes = figure.subplots()
    axes.axhline(0, color="0.7")
    for color, m in zip(("C0", "C1", "C2", "C3"), REPLICAS, strict=True):
        for every, style in ((100, "-"), (30, "--")):
            points = [
                (_mean_parameters(size), found)
                for size in NAMES
                if (found := of_both(records.losses, size, m, every))
            ]
            if points:
                axes.errorbar(
                    [x for x, _ in points],
                    [statistics.mean(found) for _, found in points],
                    [statistics.stdev(found) if len(found) > 1 else 0 for _, found in points],
                    fmt=f"o{style}",
                    capsize=3,
                    color=color,
                    label=f"M = {m}, H = {every}",
                )
            if (m, every) in PAPER_CELLS:
                place = PAPER_CELLS.index((m, every))
                theirs = [_paper_gaps(millions)[place] for millions in PAPER]
                axes.plot(
                    [1e6 * millions for millions in PAPER],
                    theirs,
                    f"x{style}",
                    color=color,
                    alpha=0.6,
                    label=f"paper, M = {m}, H = {every}",
                )
    axes.set(xscale="log", xlabel="parameters", ylabel="loss above DDP (%)")
    title = f"{SHORT} tokens per parameter; bars: standard deviation over seeds and models"
    axes.set_title(title, fontsize=9)
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=120)


def _mean_parameters(size: str) -> float:
    return statistics.mean(SIZES[size].parameters(model) for model in MODELS)
