"""Compare an outer step and the mean as the end of a DiLoCo fit: `python -m benchmarks.last_round`.

A fit ends with one round over every fragment. It takes the mean of the replicas' local weights; in
earlier versions it was an outer step with `mix` 0. Everything before is the same, so one training
run gives the loss after both, and after the mean with differences sent in fp32. It runs all cells
of the quality grid with the learning rates from `quality/result.json`, first with the default outer
settings, then with the tuned ones. The replicas are simulated in one process. Results are kept next
to the page, so a second call continues where the first one stopped. Further words are overrides for
all runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.common.page import provenance, write_page
from benchmarks.common.runs import load, new_pool, run_missing, save
from benchmarks.last_round.page import draw_page, page_lines
from benchmarks.last_round.runs import End, done, ends, losses_of, planned
from benchmarks.quality.grid import COMMON, Run, Size

RESULTS = Path(__file__).with_name("result.json")
QUALITY = Path(__file__).parents[1] / "quality" / "result.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs; write results and page after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs of one thread")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run later")
    parser.add_argument("--quality", type=Path, default=QUALITY)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, more = parser.parse_known_args(arguments)
    size = Size()
    setting = {**asdict(size), "common": COMMON, "overrides": more}
    grid_losses = load(options.quality, {**setting, "overrides": []}, Run).losses
    block = provenance("last_round", [f"--seeds={options.seeds}", *more], options.results)
    results = load(options.results, setting, End)

    def write() -> None:
        picture = options.results.with_suffix(".png")
        draw_page(results.losses, grid_losses, options.seeds, picture)
        lines = page_lines(results, grid_losses, size, options.seeds, picture.name)
        write_page(options.results.with_suffix(".md"), lines)

    write()
    have = done(results.losses)
    plan = partial(planned, grid_losses, options.seeds)
    one = partial(losses_of, size=size, overrides=more)
    with new_pool(options.jobs) as pool:
        for run, found in run_missing(pool, options.jobs, have, plan, one, options.seconds):
            print(f"{run}: {found}", flush=True)
            for end in ends(run):
                results.add(end, found[end.last_round], block)
            have[run] = found["mean"]
            save(options.results, results)
            write()


if __name__ == "__main__":
    main()
