"""Compare losses with DDP over model size: `python -m benchmarks.size_ladder --until 16:30`.

First build the corpus: `python -m benchmarks.size_ladder.corpus`. Every finished run is a line of
`records.jsonl`, and a later call continues where this one stopped, in the middle of a run too. One
process with one thread trains all replicas of a run; `--jobs` sets how many runs go on at a time.
A run with another library's method (`peers.py`) takes two processes, and begins again if it is
interrupted; those of torchft need the extra `bench`. `--page-only` writes the page from the
records.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.common.page import provenance, write_page
from benchmarks.common.runs import new_pool, run_missing
from benchmarks.size_ladder import corpus
from benchmarks.size_ladder.cells import planned
from benchmarks.size_ladder.page import page_lines
from benchmarks.size_ladder.picture import draw_page
from benchmarks.size_ladder.played import losses_of
from benchmarks.size_ladder.records import RECORDS, Records

PAGE = Path(__file__).with_name("result.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs until the time is up; then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--until", type=clock, default=math.inf, help="stop at HH:MM of today")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs of one thread")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--work", type=Path, default=corpus.FOLDER)
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    records = Records(options.records)
    if not options.page_only:
        made_by = provenance("size_ladder", [], options.records)
        corpus.check(options.work)
        run_until(options.until, records, options.seeds, options.jobs, options.work, made_by)
    picture = options.page.with_suffix(".png")
    draw_page(records, picture)
    write_page(options.page, page_lines(records, picture.name))


def clock(text: str) -> float:
    """Return HH:MM of today as `time.time()`."""
    hours_minutes = datetime.strptime(text, "%H:%M").time()
    return datetime.combine(datetime.now().date(), hours_minutes).timestamp()


def run_until(
    until: float, records: Records, seeds: int, jobs: int, work: Path, made_by: list[str]
) -> None:
    """Make the missing runs in order; stop at `until`, `time.time()`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with new_pool(jobs) as pool:
        plan, make = partial(planned, records.losses, seeds), partial(losses_of, until, work)
        runs = run_missing(pool, jobs, records.losses, plan, make, until - time.time())
        for cell, found in runs:
            if found is not None:
                records.add(cell, *found, made_by)
                print(f"{datetime.now():%H:%M:%S} {cell}: {found[0]}", flush=True)


if __name__ == "__main__":
    main()
