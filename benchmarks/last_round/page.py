"""Result page of the last-round benchmark, made from its results."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.common.page import draw_bars, result_page
from benchmarks.common.runs import MISSING, Results, mean_text
from benchmarks.last_round.runs import SETTINGS, End, Losses, differences, ends, winner
from benchmarks.last_round.simulated import LAST_ROUNDS
from benchmarks.quality.grid import COMMON, OuterByM, Size, best_lr, cells, seeds_of
from benchmarks.quality.grid import Losses as GridLosses
from benchmarks.quality.grid import ddp as ddp_run

TITLE = "How should a DiLoCo fit end: with an outer step or with the mean?"
HOW_TO_READ = """\
Validation loss in nats per token over the whole validation split, after each kind of last round of
the same training run. "Outer step": one more step of the outer optimizer, whose result replaces the
local weights. "Mean": the mean of the replicas' local weights, with their differences from the
global copy sent in fp4; this is how a fit ends. "Mean, fp32": the same without rounding on the
wire. "Outer - mean" is computed per run, in nats, and is positive where the mean is better. ± is
the standard deviation over the seeds. One of the two wins a cell if the mean of this difference is
further from 0 than its standard deviation; a single seed gives no verdict. The losses of DDP and
all learning rates are those of [the quality grid](../quality/result.md). Replicas are simulated in
one process with one thread, bit for bit equal to separate processes with one thread. Missing runs
are made by the next call."""


def page_lines(
    results: Results[End], grid_losses: GridLosses, size: Size, seeds: int, picture: str
) -> list[str]:
    """Return the page as Markdown lines."""
    losses = results.losses
    lines = [
        "## The runs",
        "",
        f"- every run: {size.steps:,} optimizer steps of {size.blocks_per_step} blocks of all"
        f" replicas together, `{' '.join(COMMON)}`",
        "",
        *HOW_TO_READ.splitlines(),
    ]
    for name, outer in SETTINGS.items():
        knobs = [f"M = {replicas}: {setting}." for replicas, setting in outer.items()]
        lines += ["", f"## Outer settings: {name}", "", *knobs, ""]
        lines += _finding(losses, grid_losses, outer, seeds)
        lines += _table(losses, grid_losses, outer, seeds)
    first = opening(losses, grid_losses, seeds, picture)
    return result_page(TITLE, first, results.made_by, lines)


def opening(losses: Losses, grid_losses: GridLosses, seeds: int, picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        "When a fit ends, replicas have different weights, but the result must be one model. In"
        " earlier versions this was the result of one more outer step; now it is the mean of the"
        " replicas' weights. Which has the lower validation loss?",
        "",
    ]
    for name, outer in SETTINGS.items():
        verdicts = [
            winner(differences(losses, seeds_of(cell, seeds)))
            for cell in cells(grid_losses, "fp4", 1, outer)
        ]
        told = [verdict for verdict in verdicts if verdict not in (MISSING, "one seed")]
        lacking = len(verdicts) - len(told)
        lines.append(
            f"- **Found, outer settings: {name}:** the mean is better by more than the standard"
            f" deviation over seeds in {told.count('mean')} of {len(told)} cells, the outer step in"
            f" {told.count('outer step')}{f'; {lacking} cells lack seeds' if lacking else ''}."
            if told
            else f"- Outer settings: {name}: not run yet."
        )
    return [*lines, "", f"![loss after the outer step minus loss after the mean]({picture})"]


def draw_page(losses: Losses, grid_losses: GridLosses, seeds: int, path: Path) -> None:
    """Draw the mean difference of every cell as a PNG; positive where the mean is better."""
    groups: dict[str, dict[str, float]] = {}
    for name, outer in SETTINGS.items():
        for cell in cells(grid_losses, "fp4", 1, outer):
            found = differences(losses, seeds_of(cell, seeds))
            group = groups.setdefault(f"{cell.model}\nM={cell.replicas} H={cell.sync_every}", {})
            if found:
                group[name] = 1e3 * statistics.mean(found)
    title = "Outer step minus mean; above 0 the mean is better"
    draw_bars(path, title, "thousandths of a nat", groups)


def _finding(losses: Losses, grid_losses: GridLosses, outer: OuterByM, seeds: int) -> list[str]:
    """Return the verdicts on the cells of one outer setting, as a list."""
    by_verdict: dict[str, list[str]] = {}
    for cell in cells(grid_losses, "fp4", 1, outer):
        found = differences(losses, seeds_of(cell, seeds))
        text = f"{cell.model} M = {cell.replicas} H = {cell.sync_every}"
        by_verdict.setdefault(winner(found), []).append(
            text if not found else f"{text} ({mean_text(found, '+.4f')})"
        )
    words = {
        "mean": "the mean is better by more than the standard deviation over seeds in",
        "outer step": "the outer step is better by more than the standard deviation over seeds in",
        "neither": "neither is better in",
        "one seed": "one seed only in",
        MISSING: "not run:",
    }
    lines = ["Outer step - mean, in nats:", ""]
    for verdict, text in words.items():
        named = by_verdict.get(verdict, [])
        if named or verdict == "outer step":
            lines.append(f"- {text} {len(named)} cells{': ' if named else ''}{', '.join(named)}.")
    return [*lines, ""]


def _table(losses: Losses, grid_losses: GridLosses, outer: OuterByM, seeds: int) -> list[str]:
    lines = [
        "| model | M | H | seeds | DDP | outer step | mean | mean, fp32 | outer - mean | wins |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells(grid_losses, "fp4", 1, outer):
        runs = seeds_of(cell, seeds)
        lr = best_lr(grid_losses, ddp_run(cell.model)) or 0.0
        ddp_runs = [ddp_run(cell.model, seed, lr) for seed in range(1, seeds + 1)]
        ddp = [grid_losses[job] for job in ddp_runs if job in grid_losses]
        found = differences(losses, runs)
        columns = {
            name: [
                losses[end]
                for run in runs
                for end in ends(run)
                if end.last_round == name and end in losses
            ]
            for name in LAST_ROUNDS
        }
        texts = [mean_text(columns[name], ".4f") for name in ("outer", "mean", "mean_fp32")]
        lines.append(
            f"| {cell.model} | {cell.replicas} | {cell.sync_every} | {len(found)} of {seeds}"
            f" | {mean_text(ddp, '.4f')} | {' | '.join(texts)}"
            f" | {mean_text(found, '+.4f')} | {winner(found)} |"
        )
    return lines
