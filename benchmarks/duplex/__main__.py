"""Compare all-gathers over slow links with one socket per rank pair and with one per direction.

`python -m benchmarks.duplex` measures the gain from `Channel.open(full_duplex=True)`. It needs
root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.lab import BURST_KIB, LaboratoryUnavailable, NetLab, exit_on_signals

PAGE = Path(__file__).with_name("result.md")
TITLE = "How much does one socket per direction gain?"
MEGABITS = 100
HOW_TO_READ = f"""\
Every rank gathers the given number of bytes from every other rank through `Channel.all_gather`,
alternately with one gloo group and with one per direction, over links of {MEGABITS} Mbit/s in each
direction (`benchmarks/lab/netlab.py`). In every round a different rank launches 20 ms after the
others, as happens in training; each figure is the median over the rounds of that rank's
milliseconds. Bytes / rate: a rank's own bytes to all others, sent and received at the same time.
This is no lower bound, because a link passes {BURST_KIB} KiB unshaped after a pause and the others
started earlier."""
Seconds = Mapping[tuple[int, str, int], Sequence[float]]  # by nodes, kind and bytes


def measure(node_counts: Sequence[int], sizes: Sequence[int], rounds: int) -> Seconds:
    """Measure the seconds of every gather.

    Raises:
        LaboratoryUnavailable: this machine cannot run the laboratory.
        RuntimeError: a node failed.
    """
    found: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for nodes in node_counts:
        plan = json.dumps({"sizes": sizes, "rounds": rounds})
        with tempfile.TemporaryDirectory() as folder, NetLab(nodes, f"{MEGABITS}mbit") as lab:
            files = [Path(folder) / f"{node}.jsonl" for node in range(nodes)]
            command = [sys.executable, "-m", "benchmarks.duplex.job", plan]
            commands = [[*command, str(file)] for file in files]
            results = lab.run(commands, timeout_s=600, env={"OMP_NUM_THREADS": "1"})
            for result in results:
                if result.returncode:
                    raise RuntimeError(f"A node of {nodes} failed:\n{result.output}")
            for line in "".join(file.read_text() for file in files if file.exists()).splitlines():
                kind, num_bytes, seconds = json.loads(line)
                found[nodes, kind, num_bytes].append(seconds)
    return found


def opening(seconds: Seconds, picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        "In an all-gather, every two ranks send to each other at the same time. gloo has only one"
        " socket between them, so one direction waits for the other.",
        "",
    ]
    for nodes, by_size in medians_ms(seconds).items():
        shares = ", ".join(
            f"{two / one:.2f} of the time for {num_bytes / 1e6:g} MB"
            for num_bytes, (one, two) in by_size.items()
        )
        lines.append(
            f"- **Found, {nodes} nodes at {MEGABITS} Mbit/s:** with one socket per direction a"
            f" gather takes {shares}."
        )
    return [*lines, "", f"![milliseconds a gather]({picture})"]


def medians_ms(seconds: Seconds) -> dict[int, dict[int, tuple[float, float]]]:
    """Return the milliseconds with one socket and with two, by nodes and bytes."""
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for nodes, num_bytes in dict.fromkeys((nodes, size) for nodes, _, size in seconds):
        one, two = (
            1e3 * statistics.median(seconds[nodes, kind, num_bytes]) for kind in ("one", "two")
        )
        found.setdefault(nodes, {})[num_bytes] = one, two
    return found


def draw(seconds: Seconds, path: Path) -> None:
    """Draw the milliseconds of a gather as a PNG."""
    groups = {
        f"{nodes} nodes, {num_bytes / 1e6:g} MB": {"one socket": one, "two sockets": two}
        for nodes, by_size in medians_ms(seconds).items()
        for num_bytes, (one, two) in by_size.items()
    }
    draw_bars(path, f"A gather at {MEGABITS} Mbit/s", "ms", groups)


def page_lines(seconds: Seconds) -> list[str]:
    """Return the page below the provenance."""
    lines = [
        "| nodes | MB a rank | bytes / rate, ms | one socket, ms | two, ms | two / one | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for nodes, by_size in medians_ms(seconds).items():
        for num_bytes, (one, two) in by_size.items():
            rounds = seconds[nodes, "one", num_bytes]
            ideal = 8e3 * num_bytes * (nodes - 1) / (MEGABITS * 1e6)
            lines.append(
                f"| {nodes} | {num_bytes / 1e6:g} | {ideal:.1f} | {one:.1f} | {two:.1f}"
                f" | {two / one:.2f} | {len(rounds)} |"
            )
    return ["## The gathers", "", *HOW_TO_READ.splitlines(), "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.duplex", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 8_000_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    exit_on_signals()
    block = provenance("duplex", arguments, options.page)
    try:
        seconds = measure(options.nodes, options.sizes, options.rounds)
    except (LaboratoryUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    picture = options.page.with_suffix(".png")
    draw(seconds, picture)
    first = opening(seconds, picture.name)
    write_page(options.page, result_page(TITLE, first, [block], page_lines(seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
