"""Count the bytes that a rank of a replica holds under each layout: `python -m benchmarks.layouts`.

Measurements are kept next to the page, so a second call continues where the first one stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bandwidth.measure import Results
from benchmarks.common.page import BENCHMARKS, provenance, result_page, write_page
from benchmarks.lab import exit_on_signals
from benchmarks.layouts import memory
from benchmarks.layouts.ranks import RanksFailed

PAGE = Path(__file__).with_name("result.md")
TITLE = "How much memory does a rank of a replica need?"
QUESTION = (
    'Each rank of a replica holds a whole model (`inside="ddp"`) or shards of one'
    ' (`inside="fsdp"`). How much memory does a rank need?'
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layouts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per set of processes")
    parser.add_argument("--toy", action="store_true", help="very small models, for a trial")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.toy and options.page.resolve().is_relative_to(BENCHMARKS):
        parser.error("--toy needs a --page outside of benchmarks/: its figures mean nothing")
    return options


def write(results: Results, page: Path) -> None:
    """Write the page and its picture."""
    records, picture = results.raw["records"], page.with_suffix(".png")
    memory.draw(records, picture)
    opening = [
        QUESTION,
        "",
        *memory.opening(records),
        "",
        f"![megabytes held by a rank, by number of ranks and layout]({picture.name})",
    ]
    body = ["## Memory of a rank", "", *memory.page_lines(records, results.raw["settings"])]
    write_page(page, result_page(TITLE, opening, results.made_by, body))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write the page."""
    options = parse(arguments)
    exit_on_signals()
    block = provenance("layouts", arguments, options.page)
    settings = memory.TOY if options.toy else memory.SETTINGS
    try:
        results = Results(options.page.with_name("memory.json"), settings, block)
        memory.measure(results, settings, options.timeout)
    except (RanksFailed, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    write(results, options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
