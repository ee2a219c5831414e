"""Compare the loss of votes with Lion and AdamW: `python -m benchmarks.lion_quality`.

Distributed Lion with 2, 4 and 8 workers, compared with Lion and AdamW on the mean of the same
gradients. The workers are simulated in one process, bit for bit equal to separate processes.
Results are kept next to the page, so a second call continues where the first one stopped, and the
page is rewritten after each run. Further words are overrides for all runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.page import provenance, write_page
from benchmarks.common.pretraining import Config
from benchmarks.common.runs import load, new_pool, run_missing, save
from benchmarks.lion_quality.grid import COMMON, DECAY, MODELS, Run, planned
from benchmarks.lion_quality.page import draw_page, page_lines
from benchmarks.lion_quality.simulated import configuration, loss_of

RESULTS = Path(__file__).with_name("result.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs; write results and page after every run, and the figure at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs of one thread")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run later")
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
            for run, loss in run_missing(
                pool, options.jobs, results.losses, plan, one, options.seconds
            ):
                print(f"{run}: {loss:.4f}", flush=True)
                results.add(run, loss, block)
                save(options.results, results)
                write_page(page, page_lines(results, options.seeds, f"{page.stem}.png"))
    finally:  # after an interrupt too, so that the figure matches the page
        draw_page(results.losses, options.seeds, page.with_suffix(".png"))


def _optimizer(method: str, steps: int, overrides: Sequence[str]) -> Config:
    """Return the optimizer settings common to all runs of a method."""
    run = Run(next(iter(MODELS)), method, 0, 1, 1.0, 0.9, 0.99)
    optimizer: Config = configuration(run, steps, overrides)["optimizer"]
    varied = ("lr", "betas", "weight_decay")
    return {key: value for key, value in optimizer.items() if key not in varied}


if __name__ == "__main__":
    main()
