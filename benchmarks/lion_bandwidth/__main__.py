"""Distributed Lion over slow links: `python -m benchmarks.lion_bandwidth`.

Uses `benchmarks.bandwidth` with other rows and several numbers of nodes: step time, utilization and
bytes of Distributed Lion, with and without overlap, compared with DDP. It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.measure import (
    DDP_ROWS,
    HEAP,
    Results,
    ddp_steps,
    jobs_of_fits,
    measure,
)
from benchmarks.bandwidth.window import LEG_STEPS
from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
from benchmarks.lion_bandwidth.page import LABELS, TITLE, draw, opening, page_lines

PAGE = Path(__file__).with_name("result.md")
BYTES_ONLY = ("lion_random", "lion_average", "lion_zeros")


def jobs(rate: str, rows: Sequence[str], round_: int, options: argparse.Namespace) -> Iterator[Any]:
    """Yield the jobs of one round.

    Rows that only show bytes, which are the same in every round, run in the first.
    """
    due = [row for row in rows if round_ == 0 or row not in BYTES_ONLY]
    steps = dict.fromkeys(rows, options.steps)
    steps |= dict.fromkeys(DDP_ROWS, ddp_steps(rate, options.steps))
    yield from jobs_of_fits([(row, steps[row]) for row in due], round_)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lion_bandwidth", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4], help="%(default)s")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--rows", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of a window (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per row")
    parser.add_argument("--raw", type=Path, default=Path("outputs/bench/lion_bandwidth.json"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    parser.set_defaults(sync_every=100, size="5.8M")  # read by the shared job
    options = parser.parse_args(arguments)
    for name, least in (("rounds", 1), ("steps", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} or more, not {getattr(options, name)}")
    if min(options.nodes) < 2:
        parser.error(f"--nodes must be 2 or more each, not {options.nodes}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page."""
    options = parse(arguments)
    exit_on_signals()
    block = provenance("lion_bandwidth", arguments, options.page)
    try:
        settings = {"steps": options.steps, "leg_steps": LEG_STEPS, "heap": HEAP}
        results = Results(options.raw, settings, block)
        if not options.page_only:
            for nodes in options.nodes:
                print(f"{nodes} nodes", flush=True)
                measure(results, options, jobs, nodes)
    except (LaboratoryUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    picture = options.page.with_suffix(".png")
    draw(results.raw["records"], options.rates, picture)
    body = page_lines(results.raw, options.rates, options.nodes, os.cpu_count() or 1)
    first = opening(results.raw["records"], options.rates, picture.name)
    write_page(options.page, result_page(TITLE, first, results.made_by, body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
