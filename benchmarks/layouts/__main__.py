"""What a replica of several ranks holds and sends: `python -m benchmarks.layouts PART`.

`memory` counts what a rank holds. `link` times two replicas over a slow link; it takes root and
iproute2. `large` looks for the largest Llama that fits. What a part has measured is kept beside the
page, so that it goes on where it stopped, and the page has the parts that are there.
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
TITLE = "What does a replica of several ranks hold and send?"
PARTS: dict[str, ModuleType] = {"memory": memory, "link": link, "large": large}
HEADINGS = {
    "memory": "What a rank holds",
    "link": "Over a slow link",
    "large": "The largest model",
}
ASKED = (
    'The ranks of a replica hold a model each (`inside="ddp"`), or parts of one'
    ' (`inside="fsdp"`, `"domino"`). What does a rank hold, how long is a step over a slow link'
    " between replicas, and how large may the model be?"
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layouts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=str([*PARTS]))
    parser.add_argument("--rounds", type=int, default=4, help="of the link (%(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds, a set of processes")
    parser.add_argument("--toy", action="store_true", help="very small models, for a try-out")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    if options.toy and options.page.resolve().is_relative_to(BENCHMARKS):
        parser.error("--toy needs a --page outside of benchmarks/: its figures say nothing")
    return options


def results_of(part: str, options: argparse.Namespace, block: Sequence[str] = ()) -> Results:
    """Return what a part has measured so far.

    Raises:
        ValueError: it was measured with other settings.
    """
    settings = PARTS[part].TOY if options.toy else PARTS[part].SETTINGS
    return Results(options.page.with_name(f"{part}.json"), settings, block)


def write(options: argparse.Namespace) -> None:
    """Write the page of all parts that have been measured, and its picture."""
    opening, body, made_by, drawn = [ASKED, ""], [], [], []
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
            drawn = ["", f"![megabytes that a rank holds, by ranks and layout]({picture.name})"]
    write_page(options.page, result_page(TITLE, [*opening, *drawn], made_by, body[:-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts that are asked for, then write the page."""
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
