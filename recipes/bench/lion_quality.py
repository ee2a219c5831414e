"""What the vote costs in loss, same tokens: `python -m recipes.bench.lion_quality`.

Distributed Lion by majority and average, with 2, 4 and 8 workers, against Lion and AdamW on the
mean of the same gradients. The workers are played in one process, bit for bit what the same number
of processes come to (`_played_lion`). Results are kept as they come, beside the page, so a second
call goes on where the first one stopped, and the page is written anew after each run. First comes
every method's learning rate, then the seeds (`lion_quality_grid`). Further words go to all runs as
overrides.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
from hydra import compose, initialize_config_dir
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from recipes.bench._played_lion import Config, train
from recipes.bench.demo import RESULTS
from recipes.bench.kept import MISSING, Results, load, mean_text, save
from recipes.bench.lion_quality_grid import (
    BLOCKS_PER_STEP,
    COMMON,
    DECAY,
    MODELS,
    TARGET,
    Losses,
    Run,
    at_best,
    best_lr,
    cells,
    lr_of,
    percents_above,
    planned,
    sweep,
)
from recipes.bench.page import provenance, write_page
from recipes.bench.side_by_side import made

CONF = Path(__file__).parents[2] / "conf"
NAMES = {"adamw": "AdamW", "g_lion": "G-Lion"}
HOW_TO_READ = f"""\
Validation loss in nats per token over the whole validation split, of the last weights. In every
step all runs of one seed see the same {BLOCKS_PER_STEP} blocks; with n workers each takes every
n-th of them, makes its own gradient and moves its own momentum. G-Lion (Lion) and AdamW take the
mean gradient of the same blocks, as under DDP. A difference is taken seed by seed, positive where
the vote is worse; ± is the standard deviation over the seeds, and stands only where there are
several. The target is on the mean. Each method has its own learning rate, the best one on seed 1;
the highest learning rate times the weight decay is {DECAY} in every run. Betas and schedule are
those of `conf/optimizer/`, above. Runs that have not been made are missing, and the next
call makes them. The commits above are those at which runs were made."""
LIMIT = """\
Lion is known to like large batches (google/automl, lion/README.md: best at 4,096 images where AdamW
is best at 256), and these are small. We believe, and have not shown, that most of what Lion lacks
against AdamW here comes from that and from the few steps. Betas were not tuned: all of Lion's rows
have those that the package has by default."""
TUNED_ON = """\
Validation loss with seed 1. All rates are rungs of one ladder of factors of 2; where a method's
best rung was at an end of what was tried, the next one was tried as well. An empty place was not
needed. The best rate is in bold, and every other seed takes it."""


def configuration(job: Run, steps: int, overrides: Sequence[str]) -> Config:
    """Return what `recipes.pretrain` would be given for a run, in plain dicts and lists."""
    words = ["run_dir=none", *job.overrides(steps), *overrides]  # nothing is written there
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("pretrain", words)
    return cast(Config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def run(job: Run, steps: int, overrides: Sequence[str]) -> float:
    """Make one run and return its validation loss in nats per token."""
    return train(configuration(job, steps, overrides), job.workers, job.vote)


def new_pool(jobs: int) -> Executor:
    """Return so many processes of one thread each."""
    spawn = get_context("spawn")  # a fork would inherit this process's threads as locks
    return ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,))


def label(job: Run) -> str:
    """Return the method's name as the page says it."""
    return NAMES.get(job.method) or f"{job.method}, n = {job.workers}"


def page_lines(results: Results[Run], seeds: int) -> list[str]:
    """Return the page as lines of Markdown."""
    losses, steps = results.losses, results.setting["steps"]
    return [
        "# Quality: Distributed Lion, Lion and AdamW, same tokens",
        "",
        *(line for block in results.made_by for line in block),
        f"- every run: one process of one thread, {steps:,} steps, `{' '.join(COMMON)}`",
        *(f"- {model}: `{' '.join(words)}`" for model, words in MODELS.items()),
        *(f"- `{json.dumps(optimizer)}`" for optimizer in results.setting["optimizers"]),
        "",
        *HOW_TO_READ.splitlines(),
        "",
        "## Against Lion and AdamW on the mean gradient",
        "",
        *_main_table(losses, seeds),
        "",
        "## The learning rates",
        "",
        *TUNED_ON.splitlines(),
        "",
        *_sweep_table(losses),
        "",
        "## What the limit is, as we believe",
        "",
        *LIMIT.splitlines(),
        "",
        "![difference from G-Lion](lion_quality.png)",
    ]


def _main_table(losses: Losses, seeds: int) -> list[str]:
    lines = [
        "| model | method | rate | seeds | loss | against G-Lion | against AdamW | target | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        runs = {(cell.method, cell.workers): at_best(losses, cell, seeds) for cell in cells(model)}
        for cell in _in_order(model):
            ours = runs[cell.method, cell.workers]
            found = [losses[job] for job in ours if job in losses]
            lion = percents_above(losses, ours, runs["g_lion", 1])
            adamw = percents_above(losses, ours, runs["adamw", 1])
            aimed = (cell.method, cell.workers) == ("majority", 4)
            target = f"{TARGET} % | {_verdict(lion)}" if aimed else "|"
            lines.append(
                f"| {model} | {label(cell)} | {best_lr(losses, cell) or MISSING}"
                f" | {len(found)} of {seeds} | {mean_text(found, '.4f')}"
                f" | {'' if cell.method == 'g_lion' else mean_text(lion, '+.2f', ' %')}"
                f" | {'' if cell.method == 'adamw' else mean_text(adamw, '+.2f', ' %')}"
                f" | {target} |"
            )
    return lines


def _sweep_table(losses: Losses) -> list[str]:
    all_cells = [cell for model in MODELS for cell in _in_order(model)]
    rungs = sorted({rung for cell in all_cells for rung in sweep(losses, cell)})
    lines = [
        f"| model | method | {' | '.join(str(lr_of(rung)) for rung in rungs)} |",
        "|---|---|" + "---|" * len(rungs),
    ]
    for cell in all_cells:
        wanted, best = sweep(losses, cell), best_lr(losses, cell)
        texts = []
        for rung in rungs:
            loss = losses.get(Run(cell.model, cell.method, cell.workers, 1, lr_of(rung)))
            text = (MISSING if rung in wanted else "") if loss is None else f"{loss:.4f}"
            texts.append(f"**{text}**" if lr_of(rung) == best else text)
        lines.append(f"| {cell.model} | {label(cell)} | {' | '.join(texts)} |")
    return lines


def _in_order(model: str) -> list[Run]:
    """Return the cells as a reader looks for them: what the vote is compared with comes first."""
    methods = ["adamw", "g_lion", "majority", "average"]
    return sorted(cells(model), key=lambda cell: (methods.index(cell.method), cell.workers))


def _verdict(percents: Sequence[float]) -> str:
    if not percents:
        return MISSING
    return "met" if math.fsum(percents) / len(percents) <= TARGET else "missed"


def draw_page(losses: Losses, seeds: int, path: Path) -> None:
    """Write a PNG with every seed's difference from G-Lion, method by method."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which keeps global state and may look for a display
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
        order = [cell for cell in _in_order(model) if cell.method != "g_lion"]
        lion = at_best(losses, Run(model, "g_lion", 1, 1, 0.0), seeds)
        for place, cell in enumerate(order):
            percents = percents_above(losses, at_best(losses, cell, seeds), lion)
            axes.plot([place] * len(percents), percents, "o", color="C0", alpha=0.6)
        axes.axhline(0, color="0.7")
        aimed = order.index(Run(model, "majority", 4, 1, 0.0))
        axes.hlines(TARGET, aimed - 0.4, aimed + 0.4, color="0.3", linestyle="--")
        axes.set_xticks(range(len(order)), list(map(label, order)), rotation=60, fontsize=8)
        axes.set(title=model)
        axes.label_outer()
    figure.supylabel("loss above G-Lion (%); dashed: the target", fontsize=9)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing; write results and page after every run, and the figure at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run later")
    parser.add_argument("--results", type=Path, default=RESULTS / "lion_quality.json")
    options, more = parser.parse_known_args(arguments)
    setting = {
        "steps": options.steps,
        "common": COMMON,
        "models": MODELS,
        "decay": DECAY,
        "optimizers": [_optimizer(method, options.steps, more) for method in ("adamw", "g_lion")],
        "overrides": more,
    }
    command = ["python", "-m", "recipes.bench.lion_quality", f"--steps={options.steps}"]
    block = provenance(shlex.join([*command, f"--seeds={options.seeds}", *more]))
    results = load(options.results, setting, Run)
    page = options.results.with_suffix(".md")
    write_page(page, page_lines(results, options.seeds))
    plan = partial(planned, results.losses, options.seeds)
    one = partial(run, steps=options.steps, overrides=more)
    try:
        with new_pool(options.jobs) as pool:
            for job, loss in made(pool, options.jobs, results.losses, plan, one, options.seconds):
                print(f"{job}: {loss:.4f}", flush=True)
                results.add(job, loss, block)
                save(options.results, results)
                write_page(page, page_lines(results, options.seeds))
    finally:  # a call that is interrupted too: its figure shows what its page does
        draw_page(results.losses, options.seeds, page.with_suffix(".png"))


def _optimizer(method: str, steps: int, overrides: Sequence[str]) -> Config:
    """Return what is the same in all runs with a method's optimizer."""
    job = Run(next(iter(MODELS)), method, 1, 1, 1.0)
    optimizer: Config = configuration(job, steps, overrides)["optimizer"]
    return {key: value for key, value in optimizer.items() if key not in ("lr", "weight_decay")}


if __name__ == "__main__":
    main()
