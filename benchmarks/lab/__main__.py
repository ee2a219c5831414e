"""Run one command in every node of a network laboratory, over slow links.

    python -m benchmarks.lab --rate 100mbit --nodes 2 -- python train.py

prints the output of each node and the bytes that its interface sent. It needs Linux, root and
iproute2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command in every node; return 0 if all of them succeeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of every link (%(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="%(default)s")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (%(default)s)")
    parser.add_argument("command", nargs="+", help="what every node runs, after `--`")
    options = parser.parse_args(argv)
    exit_on_signals()
    try:
        with NetLab(options.nodes, options.rate) as lab:
            results = lab.run([options.command] * options.nodes, options.timeout)
    except (LaboratoryUnavailable, ValueError) as error:
        parser.exit(2, f"{error}\n")
    for node, result in enumerate(results):
        print(f"--- node{node}: exit code {result.returncode}, sent {result.sent_bytes} bytes")
        print(result.output, end="")
    return int(any(result.returncode for result in results))


if __name__ == "__main__":
    sys.exit(main())
