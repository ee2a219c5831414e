"""Compare the step time of two checkouts: `python -m benchmarks.commits BEFORE AFTER`.

BEFORE and AFTER are checkouts, as made by `git worktree add`. Both libraries train the same model
with the same script (`job`) on two nodes of the laboratory, alternating fit by fit; the order is
reversed in every second round. For each row it prints the median over rounds of both mean step
times, the ratio of these medians (AFTER / BEFORE), and the smallest and largest ratio of a round.
The mean of a fit covers whole cycles, so that it includes every exchange.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.commits.job import ROWS, SYNC_EVERY
from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals

JOB = Path(__file__).with_name("job.py")


class Compared(NamedTuple):
    """Step times of two checkouts in seconds, and their ratios."""

    before: float
    after: float
    ratio: float
    least: float
    most: float


def compared(before: Sequence[float], after: Sequence[float]) -> Compared:
    """Compare the times of two checkouts, paired by round."""
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    medians = statistics.median(before), statistics.median(after)
    return Compared(*medians, medians[1] / medians[0], min(ratios), max(ratios))


def mean_step(checkout: Path, row: str, steps: int) -> float:
    """Run one fit and return its mean step time in seconds.

    Raises:
        RuntimeError: a node failed; the text contains its output.
    """
    with tempfile.TemporaryDirectory() as folder, NetLab(2, ROWS[row][0]) as lab:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, str(JOB), row, str(steps), str(out)]
        env = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        results = lab.run([command] * 2, timeout_s=300, env=env)
        if any(result.returncode for result in results):
            raise RuntimeError(f"{checkout}: {results[0].output}{results[1].output}")
        return statistics.fmean(json.loads(out.read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.commits", description=__doc__.splitlines()[0]
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=5, help=f"of {SYNC_EVERY} steps, in a fit")
    options = parser.parse_args(arguments)
    for checkout in (options.before, options.after):
        if not (checkout / "lightning_commfree").is_dir():
            parser.error(f"{checkout} is not a checkout of this repository")

    exit_on_signals()
    checkouts = options.before.resolve(), options.after.resolve()
    for row in options.rows:
        seconds: tuple[list[float], list[float]] = ([], [])
        for i in range(options.rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                try:
                    found = mean_step(checkouts[which], row, options.cycles * SYNC_EVERY)
                except LaboratoryUnavailable as error:
                    parser.exit(2, f"{error}\n")
                seconds[which].append(found)
        old, new, ratio, least, most = compared(*seconds)
        print(
            f"{row} ({ROWS[row][0]}): {1e3 * old:.1f} -> {1e3 * new:.1f} ms a step,"
            f" ratio {ratio:.3f} ({least:.3f} to {most:.3f} by round)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
