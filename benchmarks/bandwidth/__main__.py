"""Step time, utilization and bytes over slow links: `python -m benchmarks.bandwidth`.

Two nodes of the network laboratory train the same GPT-2 with every method of the table at every
rate, alternating between methods every few steps. Measurements are kept as JSON, so an interrupted
call continues where it stopped, and `--page-only` writes the page again. It needs root and
iproute2; the rows of torchft need the extra `bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bandwidth.figures import LABELS
from benchmarks.bandwidth.job import WORKLOADS
from benchmarks.bandwidth.measure import HEAP, Results, measure
from benchmarks.bandwidth.page import TITLE, draw, opening, page_lines
from benchmarks.bandwidth.window import LEG_STEPS
from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, exit_on_signals

PAGE = Path(__file__).with_name("result.md")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bandwidth", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit", "1gbit"])
    parser.add_argument("--rows", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--size", default="5.8M", choices=list(WORKLOADS), help="of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=1, help="of DiLoCo in a window")
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="of DDP's window at most")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per row")
    parser.add_argument("--raw", type=Path, default=Path("outputs/bench/bandwidth.json"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    for name in ("rounds", "cycles", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, not {getattr(options, name)}")
    if options.sync_every < 10 or options.sync_every % 2:
        # the warm-up ends before the first launch, and torchft's two fragments share a cycle
        parser.error(f"--sync-every must be even and 10 or more, not {options.sync_every}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page."""
    options = parse(arguments)
    exit_on_signals()
    settings = {name: getattr(options, name) for name in ("size", "sync_every", "cycles", "steps")}
    settings |= {"leg_steps": LEG_STEPS, "heap": HEAP}
    block = provenance("bandwidth", arguments, options.page)
    try:
        results = Results(options.raw, settings, block)
        if not options.page_only:
            measure(results, options)
    except (LaboratoryUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    picture = options.page.with_suffix(".png")
    draw(results.raw["records"], options.rates, picture)
    first, body = opening(results.raw, picture.name), page_lines(results.raw, options.rates)
    write_page(options.page, result_page(TITLE, first, results.made_by, body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
