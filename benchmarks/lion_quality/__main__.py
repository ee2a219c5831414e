"""What the vote costs in loss, same tokens: `python -m benchmarks.lion_quality`.

Distributed Lion by majority and average, with 2, 4 and 8 workers, against Lion and AdamW on the
mean of the same gradients. The workers are played in one process, bit for bit what the same number
of processes come to (`played`). Results are kept as they come, beside the page, so a second
call goes on where the first one stopped, and the page is written anew after each run. First come
Lion's betas, then method by method learning rate and seeds (`grid`). Further words go
to all runs as overrides.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.kept import load, save
from benchmarks.common.page import provenance, write_page
from benchmarks.common.pretraining import Config
from benchmarks.common.side_by_side import made, new_pool
from benchmarks.lion_quality.grid import COMMON, DECAY, MODELS, Run, planned
from benchmarks.lion_quality.page import draw_page, page_lines
from benchmarks.lion_quality.runs import configuration, loss_of

RESULTS = Path(__file__).with_name("result.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing; write results and page after every run, and the figure at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run later")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, more = parser.parse_known_args(arguments)
    setting = {
        "steps": options.steps,
        "common": COMMON,
        "models": MODELS,
        "decay": DECAY,
        "optimizers": [_optimizer(method, options.steps, more) for method in ("adamw", "g_lion")],
        "overrides": more,
    }
    words = [f"--steps={options.steps}", f"--seeds={options.seeds}", *more]
    block = provenance("lion_quality", words, options.results)
    results = load(options.results, setting, Run)
    page = options.results.with_suffix(".md")
    write_page(page, page_lines(results, options.seeds, f"{page.stem}.png"))
    plan = partial(planned, results.losses, options.seeds)
    one = partial(loss_of, steps=options.steps, overrides=more)
    try:
        with new_pool(options.jobs) as pool:
            for run, loss in made(pool, options.jobs, results.losses, plan, one, options.seconds):
                print(f"{run}: {loss:.4f}", flush=True)
                results.add(run, loss, block)
                save(options.results, results)
                write_page(page, page_lines(results, options.seeds, f"{page.stem}.png"))
    finally:  # a call that is interrupted too: its figure shows what its page does
        draw_page(results.losses, options.seeds, page.with_suffix(".png"))


def _optimizer(method: str, steps: int, overrides: Sequence[str]) -> Config:
    """Return what is the same in all runs with a method's optimizer."""
    run = Run(next(iter(MODELS)), method, 1, 1, 1.0)
    optimizer: Config = configuration(run, steps, overrides)["optimizer"]
    of_a_run = ("lr", "betas", "weight_decay")
    return {key: value for key, value in optimizer.items() if key not in of_a_run}


if __name__ == "__main__":
    main()
