"""Compare validation losses with DDP on the same tokens: `python -m benchmarks.quality`.

Every run is one call of `recipes.pretrain`, and its loss is taken from `summary.json`. Results are
kept next to the page, so a second call continues where the first one stopped, and the page is
rewritten after each run. First come the learning rates of DDP and DiLoCo, then all seeds with the
tuned outer settings, then the default settings and those in between. Further words are overrides
for all runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from benchmarks.common.page import provenance, write_page
from benchmarks.common.pretraining import summary_of
from benchmarks.common.runs import Results, load, run_missing, save
from benchmarks.quality.grid import (
    COMMON,
    Run,
    Size,
    planned,
)
from benchmarks.quality.page import draw_page, page_lines

RESULTS = Path(__file__).with_name("result.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs; write results, page and figure after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Size):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default, help="%(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run later")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/quality"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, more = parser.parse_known_args(arguments)
    size = Size(options.width, options.blocks_per_step, options.steps)
    setting = {**asdict(size), "common": COMMON, "overrides": more}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(size).items()]
    block = provenance("quality", [*words, f"--seeds={options.seeds}", *more], options.results)
    results = load(options.results, setting, Run)
    _write(results, size, options.seeds, options.results)
    plan = partial(planned, results.losses, options.seeds)

    def loss_of(run: Run) -> float:
        summary = summary_of([*run.overrides(size), *more], options.work / run.name)
        return float(summary["validation_loss"])

    with ThreadPoolExecutor(options.jobs) as pool:  # a run is a subprocess
        runs = run_missing(pool, options.jobs, results.losses, plan, loss_of, options.seconds)
        for run, loss in runs:
            results.add(run, loss, block)
            save(options.results, results)
            _write(results, size, options.seeds, options.results)


def _write(results: Results[Run], size: Size, seeds: int, path: Path) -> None:
    write_page(path.with_suffix(".md"), page_lines(results, size, seeds, f"{path.stem}.png"))
    draw_page(results.losses, seeds, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
