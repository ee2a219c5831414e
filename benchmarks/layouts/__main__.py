"""Memory and traffic of replicas with several ranks: `python -m benchmarks.layouts PART`.

`memory` counts the bytes of a rank. `link` times two replicas over a slow link; it needs root and
iproute2. `large` finds the largest Llama that fits. Measurements are kept next to the page, so a
part continues where it stopped, and the page contains all parts measured so far.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.bandwidth.measure import Results
from benchmarks.common.page import BENCHMARKS, provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
from benchmarks.layouts import large, link, memory
from benchmarks.layouts.ranks import RanksFailed

PAGE = Path(__file__).with_name("result.md")
TITLE = "How much does a replica of several ranks hold and send?"
PARTS: dict[str, ModuleType] = {"memory": memory, "link": link, "large": large}
HEADINGS = {
    "memory": "Memory of a rank",
    "link": "Over a slow link",
    "large": "The largest model",
}
QUESTION = (
    'Each rank of a replica holds a whole model (`inside="ddp"`) or shards of one'
    ' (`inside="fsdp"`, `"domino"`). How much memory does a rank need, how long is a step over a'
    " slow link between replicas, and how large can the model be?"
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layouts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=str([*PARTS]))
    parser.add_argument("--rounds", type=int, default=4, help="of part `link` (%(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per set of processes")
    parser.add_argument("--toy", action="store_true", help="very small models, for a trial")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    if options.toy and options.page.resolve().is_relative_to(BENCHMARKS):
        parser.error("--toy needs a --page outside of benchmarks/: its figures mean nothing")
    return options


def results_of(part: str, options: argparse.Namespace, block: Sequence[str] = ()) -> Results:
    """Return the measurements of a part so far.

    Raises:
        ValueError: they were made with other settings.
    """
    settings = PARTS[part].TOY if options.toy else PARTS[part].SETTINGS
    return Results(options.page.with_name(f"{part}.json"), settings, block)


def write(options: argparse.Namespace) -> None:
    """Write the page of all measured parts, and its picture."""
    opening, body, made_by, drawn = [QUESTION, ""], [], [], []
    for part, module in PARTS.items():
        results = results_of(part, options)
        records = results.raw["records"]
        body += [f"## {HEADINGS[part]}", ""]
        if not records:
            command = f"python -m benchmarks.layouts {part}"
            opening.append(f"- **{part}:** not measured yet (`{command}`).")
            body += [f"Not measured yet: `{command}`.", ""]
            continue
        opening += module.opening(records)
        body += [*module.page_lines(records, results.raw["settings"]), ""]
        made_by += results.made_by
        if part == "memory":
            picture = options.page.with_suffix(".png")
            memory.draw(records, picture)
            drawn = [
                "",
                f"![megabytes held by a rank, by number of ranks and layout]({picture.name})",
            ]
    write_page(options.page, result_page(TITLE, [*opening, *drawn], made_by, body[:-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the requested parts, then write the page."""
    options = parse(arguments)
    exit_on_signals()
    block = provenance("layouts", arguments, options.page)
    try:
        for part in options.parts:
            results = results_of(part, options, block)
            settings = results.raw["settings"]
            if part == "link":
                link.measure(results, settings, options.rounds, options.timeout)
            else:
                PARTS[part].measure(results, settings, options.timeout)
    except (LaboratoryUnavailable, RanksFailed, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    write(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
