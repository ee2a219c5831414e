"""Result page of Distributed Lion's quality benchmark: text, tables and figure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.page import result_page
from benchmarks.common.runs import MISSING, Results, mean_text
from benchmarks.lion_quality.grid import (
    BETAS,
    BETAS_RUNG,
    BLOCKS_PER_STEP,
    CLIP,
    COMMON,
    DECAY,
    MODELS,
    PRECONDITION,
    TARGET,
    WORKERS,
    Losses,
    Run,
    at_best,
    best_betas,
    best_lr,
    cells,
    is_tuned,
    lr_of,
    percents_above,
    sweep,
    tried,
    tuning,
)

TITLE = "How does the loss of Distributed Lion compare with Lion and AdamW on the same tokens?"
NAMES = {"adamw": "AdamW", "g_lion": "G-Lion"}
HOW_TO_READ = f"""\
Validation loss in nats per token over the whole validation split, of the final weights. In every
step all runs of one seed see the same {BLOCKS_PER_STEP} blocks; each of n workers takes every n-th
of them, computes its own gradient and updates its own momentum. G-Lion (Lion) and AdamW take the
mean gradient of the same blocks, as under DDP. Differences are computed per seed and are positive
where the row's method is worse; ± is the standard deviation over the seeds, if there are several.
Targets apply to the mean: G-Lion is compared with AdamW, the majority with G-Lion. Each method has
its own learning rate, the best one on seed 1; the peak learning rate times the weight decay is
{DECAY} in every run. AdamW has the betas of its recipe. Every worker clips its gradient to a norm
of {CLIP}; G-Lion and AdamW clip the mean gradient, like the recipes' Trainer. The schedules of
`conf/optimizer/` are shown above. Missing runs are made by the next call. The commits above are
those of the runs."""
BETAS_TUNED = f"""\
Validation loss of G-Lion with seed 1 at the learning rate {lr_of(BETAS_RUNG)}. The memory of beta2
is 1 / (1 - beta2) steps. The choice is made without clipping: the pair with the lowest mean over
the models is in bold, and all Lion runs use it, including the votes. The recipe's rule
(`lion_betas` in `recipes/training/optimizer.py`) gives the same pair for runs of this length."""
WITHOUT_CLIPPING = """\
G-Lion compared with AdamW by seed, both at the rates above and without clipping. A momentum filled
by large gradients of the first steps keeps their signs for a long time."""
TUNED_ON = """\
Validation loss with seed 1, without clipping for AdamW and G-Lion. All rates are rungs of one
ladder with factors of 2; if a method's best rung was at an end of the tried range, the next one was
tried as well. Empty cells were not needed. The best rate is in bold and used by every other seed.
The rungs of a vote are around G-Lion's best one, at which it runs first; a rate with a star in the
table above is the best of an incomplete search."""


def label(run: Run) -> str:
    """Return the method's name on the page."""
    return NAMES.get(run.method) or f"{run.method}, n = {run.workers}"


def page_lines(results: Results[Run], seeds: int, picture: str) -> list[str]:
    """Return the page as Markdown lines."""
    losses, steps = results.losses, results.setting["steps"]
    opening = [
        "A vote on the sign of every step uses less information than the mean of the workers'"
        " gradients. How much higher is the loss than that of Lion on this mean, and how far is"
        " Lion from AdamW? Two very small models.",
        "",
        *_finding(losses, seeds),
        "",
        f"![difference from Lion on the mean gradient]({picture})",
    ]
    body = [
        "## The runs",
        "",
        f"- every run: one process of one thread, {steps:,} steps, `{' '.join(COMMON)}`",
        *(f"- {model}: `{' '.join(words)}`" for model, words in MODELS.items()),
        *(f"- `{json.dumps(optimizer)}`" for optimizer in results.setting["optimizers"]),
        "",
        *HOW_TO_READ.splitlines(),
        "",
        "## Compared with Lion and AdamW on the mean gradient",
        "",
        *_main_table(losses, seeds),
        "",
        "## Lion's betas",
        "",
        *BETAS_TUNED.splitlines(),
        "",
        *_betas_table(losses),
        "",
        "## Without clipping",
        "",
        *WITHOUT_CLIPPING.splitlines(),
        "",
        *_unclipped_table(losses, seeds),
        "",
        "## The learning rates",
        "",
        *TUNED_ON.splitlines(),
        "",
        *_sweep_table(losses),
    ]
    return result_page(TITLE, opening, results.made_by, body)


def _finding(losses: Losses, seeds: int) -> list[str]:
    """Return the finding: the differences of Lion from AdamW, and of votes from Lion."""
    lines = []
    for model in MODELS:
        runs = _runs(losses, model, seeds)
        lion = percents_above(losses, runs["g_lion", 1], runs["adamw", 1])
        votes = []
        for n in WORKERS:
            above = percents_above(losses, runs["majority", n], runs["g_lion", 1])
            of = f" ({len(above)} of {seeds} seeds)" if 0 < len(above) < seeds else ""
            votes.append(f"{mean_text(above, '+.2f', ' %')} with {n}{of}")
        lines.append(
            f"- {model}: Lion on the mean gradient ends {mean_text(lion, '+.2f', ' %')} from AdamW"
            f" (precondition: at most {PRECONDITION} %, {_verdict(lion, PRECONDITION)}). The"
            f" majority of workers ends {', '.join(votes)} from this Lion."
        )
    betas, memory = best_betas(losses), 1 / (1 - BETAS[0][1])
    chosen = f"are {betas}" if betas else f"are {MISSING}"
    return [
        *lines,
        f"- Lion's betas {chosen}, tuned for the length of these runs, and gradients are clipped"
        f" as in the recipes. With {BETAS[0]}, which have a memory of {memory:.0f} steps, and no"
        " clipping, an earlier version of this page showed Lion 20 % behind AdamW. The cause was"
        " betas and clipping, not the vote.",
    ]


def _runs(losses: Losses, model: str, seeds: int) -> dict[tuple[str, int], list[Run]]:
    """Return the runs of each method at its best learning rate; empty while it is unknown."""
    return {
        (cell.method, cell.workers): at_best(losses, cell, seeds) for cell in cells(losses, model)
    }


def _main_table(losses: Losses, seeds: int) -> list[str]:
    lines = [
        "| model | method | rate | seeds | loss | against G-Lion | against AdamW | target | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        runs = _runs(losses, model, seeds)
        for cell in _in_order(losses, model):
            ours = runs[cell.method, cell.workers]
            found = [losses[run] for run in ours if run in losses]
            lion = percents_above(losses, ours, runs["g_lion", 1])
            adamw = percents_above(losses, ours, runs["adamw", 1])
            target = "|"
            if cell.method == "g_lion":
                target = f"{PRECONDITION} % | {_verdict(adamw, PRECONDITION)}"
            elif (cell.method, cell.workers) == ("majority", 4):
                target = f"{TARGET} % | {_verdict(lion, TARGET)}"
            lines.append(
                f"| {model} | {label(cell)} | {_rate(losses, cell)}"
                f" | {len(found)} of {seeds} | {mean_text(found, '.4f')}"
                f" | {'' if cell.method == 'g_lion' else mean_text(lion, '+.2f', ' %')}"
                f" | {'' if cell.method == 'adamw' else mean_text(adamw, '+.2f', ' %')}"
                f" | {target} |"
            )
    return lines


def _rate(losses: Losses, cell: Run) -> str:
    rate = best_lr(losses, cell)
    return MISSING if rate is None else f"{rate}{'' if is_tuned(losses, cell) else '*'}"


def _betas_table(losses: Losses) -> list[str]:
    heads = [f"{model}{clipped}" for clipped in ("", ", clipped") for model in MODELS]
    lines = [
        f"| betas | memory of beta2 | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(heads),
    ]
    columns = [tried(model, clip) for clip in (0.0, CLIP) for model in MODELS]
    for betas, *jobs in zip(BETAS, *columns, strict=True):
        texts = [MISSING if run not in losses else f"{losses[run]:.4f}" for run in jobs]
        name = f"**{betas}**" if betas == best_betas(losses) else f"{betas}"
        lines.append(f"| {name} | {1 / (1 - betas[1]):.0f} steps | {' | '.join(texts)} |")
    return lines


def _unclipped_table(losses: Losses, seeds: int) -> list[str]:
    lines = ["| model | AdamW | G-Lion | G-Lion against AdamW |", "|---|---|---|---|"]
    for model in MODELS:
        runs = _runs(losses, model, seeds)
        adamw, lion = (
            [replace(run, clip=0.0) for run in runs[method, 1]] for method in ("adamw", "g_lion")
        )
        above = percents_above(losses, lion, adamw)
        texts = [
            ", ".join(f"{losses[j]:.4f}" for j in jobs if j in losses) for jobs in (adamw, lion)
        ]
        percents = ", ".join(f"{percent:+.2f} %" for percent in above)
        lines.append(f"| {model} | {' | '.join(text or MISSING for text in (*texts, percents))} |")
    return lines


def _sweep_table(losses: Losses) -> list[str]:
    all_cells = [cell for model in MODELS for cell in _in_order(losses, model)]
    rungs = sorted({rung for cell in all_cells for rung in sweep(losses, cell)})
    lines = [
        f"| model | method | {' | '.join(str(lr_of(rung)) for rung in rungs)} |",
        "|---|---|" + "---|" * len(rungs),
    ]
    for cell in all_cells:
        wanted, best = sweep(losses, cell), best_lr(losses, cell)
        texts = []
        for rung in rungs:
            loss = losses.get(tuning(cell, rung))
            text = (MISSING if rung in wanted else "") if loss is None else f"{loss:.4f}"
            texts.append(f"**{text}**" if lr_of(rung) == best else text)
        lines.append(f"| {cell.model} | {label(cell)} | {' | '.join(texts)} |")
    return lines


def _in_order(losses: Losses, model: str) -> list[Run]:
    """Return the cells in table order: AdamW and G-Lion first."""
    methods = ["adamw", "g_lion", "majority", "average"]
    found = cells(losses, model)
    return sorted(found, key=lambda cell: (methods.index(cell.method), cell.workers))


def _verdict(percents: Sequence[float], target: float) -> str:
    if not percents:
        return MISSING
    return "met" if math.fsum(percents) / len(percents) <= target else "missed"


def draw_page(losses: Losses, seeds: int, path: Path) -> None:
    """Draw every seed's difference from G-Lion as a PNG, by method."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
        order = [cell for cell in _in_order(losses, model) if cell.method != "g_lion"]
        runs = _runs(losses, model, seeds)
        for place, cell in enumerate(order):
            ours = runs[cell.method, cell.workers]
            percents = percents_above(losses, ours, runs["g_lion", 1])
            axes.plot([place] * len(percents), percents, "o", color="C0", alpha=0.6)
        axes.axhline(0, color="0.7")
        target_place = [(cell.method, cell.workers) for cell in order].index(("majority", 4))
        axes.hlines(TARGET, target_place - 0.4, target_place + 0.4, color="0.3", linestyle="--")
        axes.set_xticks(range(len(order)), list(map(label, order)), rotation=60, fontsize=8)
        axes.set(title=model)
        axes.label_outer()
    figure.supylabel("loss above G-Lion (%); dashed: target", fontsize=9)
    figure.savefig(path, dpi=120)
