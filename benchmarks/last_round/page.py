"""The page of the last round, from its results alone."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.common.kept import MISSING, Results, mean_text
from benchmarks.common.page import draw_bars, result_page
from benchmarks.last_round.played import LAST_ROUNDS
from benchmarks.last_round.runs import SETTINGS, End, Losses, differences, ends, winner
from benchmarks.quality.grid import COMMON, OuterByM, Size, best_lr, cells, seeds_of
from benchmarks.quality.grid import Losses as Others
from benchmarks.quality.grid import ddp as ddp_run

TITLE = "How should a DiLoCo fit end: with an outer step, or with the plain mean?"
HOW_TO_READ = """\
Validation loss in nats per token over the whole validation split, after each kind of last round of
the same training run: "outer step", the outer optimizer steps once more and the local weights are
its result; "mean", the plain mean of the replicas' local weights, whose differences to the global
copy travel in fp4, which is what a fit does; "mean, fp32", the same with nothing rounded on the
wire. "Outer - mean" is taken run by run, in nats: positive where the mean is better. ± is the
standard deviation over the seeds. One of the two wins a cell if that difference's mean is further
from 0 than its standard deviation; with a single seed nothing is said. DDP's losses and all
learning rates are those of [the quality grid](../quality/result.md). Replicas are played in one
process of one thread: bit for bit what processes come to, but for what their number of threads does
to a sum. Runs that have not been made are missing, and the next call makes them."""


def page_lines(
    results: Results[End], others: Others, size: Size, seeds: int, picture: str
) -> list[str]:
    """Return the page as lines of Markdown."""
    losses = results.losses
    lines = [
        "## The runs",
        "",
        f"- every run: {size.steps:,} optimizer steps of {size.blocks_per_step} blocks by all"
        f" replicas together, `{' '.join(COMMON)}`",
        "",
        *HOW_TO_READ.splitlines(),
    ]
    for name, outer in SETTINGS.items():
        knobs = [f"M = {replicas}: {setting}." for replicas, setting in outer.items()]
        lines += ["", f"## Outer settings: {name}", "", *knobs, ""]
        lines += _finding(losses, others, outer, seeds)
        lines += _table(losses, others, outer, seeds)
    first = opening(losses, others, seeds, picture)
    return result_page(TITLE, first, results.made_by, lines)


def opening(losses: Losses, others: Others, seeds: int, picture: str) -> list[str]:
    """Return what was asked and what was found, for the top of the page."""
    lines = [
        "Replicas hold different weights when a fit ends, and one model is to come out. It was the"
        " result of one more outer step; it is the plain mean of the replicas' weights now. Which"
        " has the lower validation loss?",
        "",
    ]
    for name, outer in SETTINGS.items():
        verdicts = [
            winner(differences(losses, seeds_of(cell, seeds)))
            for cell in cells(others, "fp4", 1, outer)
        ]
        told = [verdict for verdict in verdicts if verdict not in (MISSING, "one seed")]
        lacking = len(verdicts) - len(told)
        lines.append(
            f"- **Found, outer settings: {name}:** by more than the seeds' spread the mean is"
            f" better in {told.count('mean')} of {len(told)} cells, the outer step in"
            f" {told.count('outer step')}{f'; {lacking} cells lack seeds' if lacking else ''}."
            if told
            else f"- Outer settings: {name}: not run yet."
        )
    return [*lines, "", f"![loss after the outer step minus that after the mean]({picture})"]


def draw_page(losses: Losses, others: Others, seeds: int, path: Path) -> None:
    """Write a PNG with the mean difference of every cell; positive where the mean is better."""
    groups: dict[str, dict[str, float]] = {}
    for name, outer in SETTINGS.items():
        for cell in cells(others, "fp4", 1, outer):
            found = differences(losses, seeds_of(cell, seeds))
            group = groups.setdefault(f"{cell.model}\nM={cell.replicas} H={cell.sync_every}", {})
            if found:
                group[name] = 1e3 * statistics.mean(found)
    title = "Outer step minus mean; above 0 the mean is better"
    draw_bars(path, title, "thousandths of a nat", groups)


def _finding(losses: Losses, others: Others, outer: OuterByM, seeds: int) -> list[str]:
    """Return what the settings' cells say, in a sentence or two."""
    by_verdict: dict[str, list[str]] = {}
    for cell in cells(others, "fp4", 1, outer):
        found = differences(losses, seeds_of(cell, seeds))
        text = f"{cell.model} M = {cell.replicas} H = {cell.sync_every}"
        by_verdict.setdefault(winner(found), []).append(
            text if not found else f"{text} ({mean_text(found, '+.4f')})"
        )
    words = {
        "mean": "the mean is better by more than the seeds' spread in",
        "outer step": "the outer step is better by more than the seeds' spread in",
        "neither": "neither is in",
        "one seed": "only one seed was run in",
        MISSING: "not run:",
    }
    lines = ["Outer step - mean, in nats:", ""]
    for verdict, text in words.items():
        named = by_verdict.get(verdict, [])
        if named or verdict == "outer step":
            lines.append(f"- {text} {len(named)} cells{': ' if named else ''}{', '.join(named)}.")
    return [*lines, ""]


def _table(losses: Losses, others: Others, outer: OuterByM, seeds: int) -> list[str]:
    lines = [
        "| model | M | H | seeds | DDP | outer step | mean | mean, fp32 | outer - mean | wins |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells(others, "fp4", 1, outer):
        runs = seeds_of(cell, seeds)
        lr = best_lr(others, ddp_run(cell.model)) or 0.0
        theirs = [ddp_run(cell.model, seed, lr) for seed in range(1, seeds + 1)]
        ddp = [others[job] for job in theirs if job in others]
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
