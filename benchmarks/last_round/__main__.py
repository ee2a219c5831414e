"""How a DiLoCo fit ends: outer step or plain mean? `python -m benchmarks.last_round`.

A fit ends with one round over every fragment. It takes the plain mean of the replicas' local
weights; it was an outer step with `mix` 0. All that comes before is the same, so one training run
gives the loss after either, and after a third: the mean with the differences sent in fp32. All
cells of the quality grid, with the learning rates that `quality/result.json` has found, the
default outer settings first, then the tuned ones. The replicas are played in one process
(`played`). Results are kept as they come, beside the page, so a second call goes on where
the first one stopped. Further words go to all runs as overrides.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.common.kept import load, save
from benchmarks.common.page import provenance, write_page
from benchmarks.common.side_by_side import made, new_pool
from benchmarks.last_round.page import draw_page, page_lines
from benchmarks.last_round.runs import End, done, ends, losses_of, planned
from benchmarks.quality.grid import COMMON, Run, Size

RESULTS = Path(__file__).with_name("result.json")
QUALITY = Path(__file__).parents[1] / "quality" / "result.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing; write results and page after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run later")
    parser.add_argument("--quality", type=Path, default=QUALITY)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, more = parser.parse_known_args(arguments)
    size = Size()
    setting = {**asdict(size), "common": COMMON, "overrides": more}
    others = load(options.quality, {**setting, "overrides": []}, Run).losses
    block = provenance("last_round", [f"--seeds={options.seeds}", *more], options.results)
    results = load(options.results, setting, End)

    def write() -> None:
        picture = options.results.with_suffix(".png")
        draw_page(results.losses, others, options.seeds, picture)
        lines = page_lines(results, others, size, options.seeds, picture.name)
        write_page(options.results.with_suffix(".md"), lines)

    write()
    have = done(results.losses)
    plan = partial(planned, others, options.seeds)
    one = partial(losses_of, size=size, overrides=more)
    with new_pool(options.jobs) as pool:
        for run, found in made(pool, options.jobs, have, plan, one, options.seconds):
            print(f"{run}: {found}", flush=True)
            for end in ends(run):
                results.add(end, found[end.last_round], block)
            have[run] = found["mean"]
            save(options.results, results)
            write()


if __name__ == "__main__":
    main()
