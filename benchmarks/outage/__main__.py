"""A link is down for a while in the middle of a fit: does the fit go on?

    python -m benchmarks.outage --down 30 --timeout 40

cuts two nodes off from each other while they train, for every strategy, and prints how each fit
ended. TCP notices nothing but that no answer comes: it sends again after 0.2, 0.4, 0.8, ... seconds
(at most 120), so bytes may rest for as long again as the link was down. A `timeout` must therefore
be more than twice as long as an outage; after about 15 minutes Linux gives a connection up
(`net.ipv4.tcp_retries2`). It takes root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals

STRATEGIES = ("diloco", "lion", "domino")
_START_S = 120.0  # until a fit has begun to train


class Outcome(NamedTuple):
    """What became of a fit."""

    steps: int
    after_s: float  # when the ranks ended, counted from the link's return; negative: before it
    error: str  # of the first rank that has one

    def line(self, strategy: str) -> str:
        """Return it in one line."""
        how = f"ended: {self.error}" if self.error else "went on"
        return f"{strategy}: step {self.steps}, {self.after_s:+.1f} s from the link's return, {how}"


def play(strategy: str, down_s: float, timeout_s: float) -> Outcome:
    """Cut the link of a fit of two ranks.

    Args:
        strategy: one of `STRATEGIES`.
        down_s: for how long.
        timeout_s: the strategy's `timeout`.

    Raises:
        LaboratoryUnavailable: where this machine cannot make the laboratory.
        RuntimeError: the fit did not begin, or left no word.
    """
    with tempfile.TemporaryDirectory() as name, NetLab(2, None) as lab:
        folder = Path(name)
        command = [sys.executable, "-m", "benchmarks.outage.job", strategy]
        commands = [[*command, str(timeout_s), name]] * 2
        limit_s = _START_S + 2 * down_s + 2 * timeout_s
        with ThreadPoolExecutor(1) as beside:
            job = beside.submit(lab.run, commands, limit_s, {"OMP_NUM_THREADS": "1"})
            start = time.monotonic()
            while not all((folder / f"trains_{rank}").exists() for rank in range(2)):
                if job.done() or time.monotonic() - start > _START_S:
                    break
                time.sleep(0.02)
            lab.connect(False)
            time.sleep(down_s)
            lab.connect(True)
            returned_s = time.monotonic()
            results = job.result()
        files = [folder / f"ended_{rank}.json" for rank in range(2)]
        if not all(file.exists() for file in files):
            raise RuntimeError("\n".join(result.output for result in results))
        ends = [json.loads(file.read_text()) for file in files]
    errors = [end["error"] for end in ends if end["error"]]
    last_s = max(end["at_s"] for end in ends) - returned_s
    return Outcome(min(end["step"] for end in ends), last_s, errors[0] if errors else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Play every strategy; return 0 if all fits have ended in some way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outage", description=__doc__)
    parser.add_argument("--down", type=float, default=30.0, help="seconds (%(default)s)")
    parser.add_argument("--timeout", type=float, default=40.0, help="seconds (%(default)s)")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    options = parser.parse_args(argv)
    exit_on_signals()
    try:
        for strategy in options.strategies:
            print(play(strategy, options.down, options.timeout).line(strategy), flush=True)
    except LaboratoryUnavailable as reason:
        parser.exit(2, f"{reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
