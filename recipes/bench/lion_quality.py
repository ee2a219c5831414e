"""What the vote costs in loss, same tokens: `python -m recipes.bench.lion_quality`.

Distributed Lion by majority and average, with 2, 4 and 8 workers, against Lion and AdamW on the
mean of the same gradients. The workers are played in one process, bit for bit what the same number
of processes come to (`_played_lion`). Results are kept as they come, beside the page, so a second
call goes on where the first one stopped, and the page is written anew after each run. First come
Lion's betas, then method by method learning rate and seeds (`lion_quality_grid`). Further words go
to all runs as overrides.
"""

from __future__ import annotations

import argparse
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
from omegaconf import OmegaConf

from recipes.bench._lion_quality_page import draw_page, page_lines
from recipes.bench._played_lion import Config, train
from recipes.bench.demo import RESULTS
from recipes.bench.kept import load, save
from recipes.bench.lion_quality_grid import COMMON, DECAY, MODELS, Run, planned
from recipes.bench.page import provenance, write_page
from recipes.bench.side_by_side import made

CONF = Path(__file__).parents[2] / "conf"


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
    of_a_run = ("lr", "betas", "weight_decay")
    return {key: value for key, value in optimizer.items() if key not in of_a_run}


if __name__ == "__main__":
    main()
