"""Result page of Distributed Lion's quality benchmark: text, tables and figure."""

from __future__ import annotations

import json
import statistics
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
    best_betas,
    best_lr,
    cells,
    lr_of,
    percents_above,
    search,
    tried,
    with_seeds,
)

TITLE = "How does the loss of Distributed Lion compare with Lion and AdamW on the same tokens?"
NAMES = {"adamw": "AdamW", "g_lion": "G-Lion"}
HOW_TO_READ = f"""\
Validation loss in nats per token over the whole validation split, of the final weights. In every
step all runs of one seed see the same {BLOCKS_PER_STEP} blocks; each of n workers takes every n-th
of them, computes its own gradient and updates its own momentum. G-Lion (Lion) and AdamW take the
mean gradient of the same blocks, as under DDP. Differences are computed per seed and are positive
where the row's method is worse; ± is the standard deviation over the seeds, if there are several.
Targets apply to the mean: G-Lion is compared with AdamW, the majority with G-Lion. The learning
rates of AdamW and G-Lion are the best ones on seed 1, and votes take G-Lion's; the peak learning
rate times the weight decay is {DECAY} in every run. AdamW has the betas of its recipe. Every worker
clips its gradient to a norm of {CLIP}; G-Lion and AdamW clip the mean gradient, like the recipes'
Trainer. The schedules of `conf/optimizer/` are shown above. Workers are simulated in one process,
bit for bit equal to separate ones (`tests/benchmarks/test_lion_quality.py`). Missing runs are made
by the next call. The commits above are those of the runs."""
BETAS_TUNED = f"""\
Validation loss of G-Lion with seed 1 at the learning rate {lr_of(BETAS_RUNG)}. The memory of beta2
is 1 / (1 - beta2) steps. The pair with the lowest mean over the models is in bold, and all Lion
runs use it, including the votes."""
WITHOUT_CLIPPING = """\
G-Lion compared with AdamW by seed, both at the rates above and without clipping. A momentum filled
by large gradients of the first steps keeps their signs for a long time."""
TUNED_ON = """\
Validation loss with seed 1. All rates are rungs of one ladder with factors of 2; if a method's best
rung was at an end of the tried range, the next one was tried as well. Empty cells were not needed.
The best rate is in bold and used by every other seed."""


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
        *_rates_table(losses),
    ]
    return result_page(TITLE, opening, results.made_by, body)


def _finding(losses: Losses, seeds: int) -> list[str]:
    """Return the finding: the differences of Lion from AdamW, of votes from Lion, and the betas."""
    lines = []
    for model in MODELS:
        runs = _runs(losses, model, seeds)
        lion = percents_above(losses, runs["g_lion", 0], runs["adamw", 0])
        votes = []
        for n in WORKERS:
            above = percents_above(losses, runs["majority", n], runs["g_lion", 0])
            of = f" ({len(above)} of {seeds} seeds)" if 0 < len(above) < seeds else ""
            votes.append(f"{mean_text(above, '+.2f', ' %')} with {n}{of}")
        lines.append(
            f"- {model}: Lion on the mean gradient ends {mean_text(lion, '+.2f', ' %')} from AdamW"
            f" (precondition: at most {PRECONDITION} %, {_verdict(lion, PRECONDITION)}). The"
            f" majority of workers ends {', '.join(votes)} from this Lion."
        )
    betas = best_betas(losses)
    if betas is None:
        return lines
    worse = [
        100 * (losses[columns[0]] / losses[columns[BETAS.index(betas)]] - 1)
        for columns in map(tried, MODELS)
    ]
    texts = ", ".join(
        f"{percent:+.1f} % ({model})" for percent, model in zip(worse, MODELS, strict=True)
    )
    memory = 1 / (1 - BETAS[0][1])
    return [
        *lines,
        f"- Lion's betas are {betas}, tuned for the length of these runs. {BETAS[0]}, which have a"
        f" memory of {memory:.0f} steps, end {texts} from them.",
    ]


def _runs(losses: Losses, model: str, seeds: int) -> dict[tuple[str, int], list[Run]]:
    """Return the runs of each method at its learning rate; none while it is unknown."""
    return {
        (cell.method, cell.workers): with_seeds(losses, cell, seeds)
        for cell in cells(losses, model)
    }


def _main_table(losses: Losses, seeds: int) -> list[str]:
    lines = [
        "| model | method | rate | seeds | loss | against G-Lion | against AdamW | target | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        runs = _runs(losses, model, seeds)
        for cell in cells(losses, model):
            ours = runs[cell.method, cell.workers]
            found = [losses[run] for run in ours if run in losses]
            lion = percents_above(losses, ours, runs["g_lion", 0])
            adamw = percents_above(losses, ours, runs["adamw", 0])
            target = "|"
            if cell.method == "g_lion":
                target = f"{PRECONDITION} % | {_verdict(adamw, PRECONDITION)}"
            elif cell.workers == 4:
                target = f"{TARGET} % | {_verdict(lion, TARGET)}"
            lines.append(
                f"| {model} | {label(cell)} | {best_lr(losses, cell) or MISSING}"
                f" | {len(found)} of {seeds} | {mean_text(found, '.4f')}"
                f" | {'' if cell.method == 'g_lion' else mean_text(lion, '+.2f', ' %')}"
                f" | {'' if cell.method == 'adamw' else mean_text(adamw, '+.2f', ' %')}"
                f" | {target} |"
            )
    return lines


def _betas_table(losses: Losses) -> list[str]:
    lines = [
        f"| betas | memory of beta2 | {' | '.join(MODELS)} |",
        "|---|---|" + "---|" * len(MODELS),
    ]
    for betas, *runs in zip(BETAS, *map(tried, MODELS), strict=True):
        texts = [MISSING if run not in losses else f"{losses[run]:.4f}" for run in runs]
        name = f"**{betas}**" if betas == best_betas(losses) else f"{betas}"
        lines.append(f"| {name} | {1 / (1 - betas[1]):.0f} steps | {' | '.join(texts)} |")
    return lines


def _unclipped_table(losses: Losses, seeds: int) -> list[str]:
    lines = ["| model | AdamW | G-Lion | G-Lion against AdamW |", "|---|---|---|---|"]
    for model in MODELS:
        runs = _runs(losses, model, seeds)
        adamw, lion = (
            [replace(run, clip=0.0) for run in runs[method, 0]] for method in ("adamw", "g_lion")
        )
        above = percents_above(losses, lion, adamw)
        texts = [
            ", ".join(f"{losses[run]:.4f}" for run in of_method if run in losses)
            for of_method in (adamw, lion)
        ]
        percents = ", ".join(f"{percent:+.2f} %" for percent in above)
        lines.append(f"| {model} | {' | '.join(text or MISSING for text in (*texts, percents))} |")
    return lines


def _rates_table(losses: Losses) -> list[str]:
    tuned = [cell for model in MODELS for cell in cells(losses, model) if not cell.workers]
    searches = [search(losses, cell) for cell in tuned]
    rates = sorted({run.lr for runs in searches for run in runs})
    lines = [
        f"| model | method | {' | '.join(map(str, rates))} |",
        "|---|---|" + "---|" * len(rates),
    ]
    for cell, runs in zip(tuned, searches, strict=True):
        best, at = best_lr(losses, cell), {run.lr: losses.get(run) for run in runs}
        texts = []
        for rate in rates:
            loss = at.get(rate)
            text = (MISSING if rate in at else "") if loss is None else f"{loss:.4f}"
            texts.append(f"**{text}**" if rate == best else text)
        lines.append(f"| {cell.model} | {label(cell)} | {' | '.join(texts)} |")
    return lines


def _verdict(percents: Sequence[float], target: float) -> str:
    if not percents:
        return MISSING
    return "met" if statistics.mean(percents) <= target else "missed"


def draw_page(losses: Losses, seeds: int, path: Path) -> None:
    """Draw every seed's difference from G-Lion as a PNG, by method."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
        order = [cell for cell in cells(losses, model) if cell.method != "g_lion"]
        runs = _runs(losses, model, seeds)
        for place, cell in enumerate(order):
            ours = runs[cell.method, cell.workers]
            percents = percents_above(losses, ours, runs["g_lion", 0])
            axes.plot([place] * len(percents), percents, "o", color="C0", alpha=0.6)
        axes.axhline(0, color="0.7")
        target_place = [cell.workers for cell in order].index(4)
        axes.hlines(TARGET, target_place - 0.4, target_place + 0.4, color="0.3", linestyle="--")
        axes.set_xticks(range(len(order)), list(map(label, order)), rotation=60, fontsize=8)
        axes.set(title=model)
        axes.label_outer()
    figure.supylabel("loss above G-Lion (%); dashed: target", fontsize=9)
    figure.savefig(path, dpi=120)
