"""What `sync_every="auto"` chooses, and what it hides: `python -m benchmarks.auto`.

Two replicas of a GPT-2 train on two nodes of the network laboratory, once for every link. It needs
root and iproute2, and takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.auto.cells import (
    CELLS,
    LEAST_UTILIZATION,
    Cell,
    Figures,
    Measured,
    figures_of,
    is_met,
    table,
)
from benchmarks.bandwidth.measure import HEAP
from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals

PAGE = Path(__file__).with_name("result.md")
TITLE = 'How often does `sync_every="auto"` exchange, and is it hidden?'
_NODES = 2
_POLL_S = 0.05
_STEPS = {"0.19M": 600, "5.8M": 200}


def run(cell: Cell, steps: int) -> Figures:
    """Run a cell.

    Raises:
        LaboratoryUnavailable: this machine cannot run the laboratory.
        RuntimeError: a node has failed.
    """
    lab = NetLab(_NODES, cell.rate, round_trip_s=cell.round_trip_ms / 1e3)
    with TemporaryDirectory() as folder, lab:
        if cell.other:
            lab.set_rate(cell.other, nodes=[1])
        files = [Path(folder) / f"node{node}.json" for node in range(_NODES)]
        half, ended = Path(folder) / "half", threading.Event()

        def change_rate() -> None:
            while not half.exists():
                if ended.wait(_POLL_S):
                    return
            lab.set_rate(cell.later)

        changing = threading.Thread(target=change_rate)
        if cell.later:
            changing.start()
        words = [sys.executable, "-m", "benchmarks.auto.job", json.dumps(cell), str(steps)]
        commands = [[*words, str(file), str(half)] for file in files]
        try:
            results = lab.run(commands, timeout_s=900, env={"OMP_NUM_THREADS": "1", **HEAP})
        finally:
            ended.set()
            if cell.later:
                changing.join()
        failed = [result.output for result in results if result.returncode]
        if failed:
            raise RuntimeError(f"{cell.name}: {failed[0][-3000:]}")
        return figures_of([Measured(*json.loads(file.read_text())) for file in files])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cells and write the page; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.auto", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    exit_on_signals()
    block = provenance("auto", arguments, options.page)
    found: list[tuple[Cell, Figures]] = []
    for cell in CELLS:
        if options.only not in cell.name:
            continue
        try:
            # a link that changes is measured before and after
            found.append((cell, run(cell, _STEPS[cell.size] * (2 if cell.later else 1))))
        except LaboratoryUnavailable as error:
            print(error, file=sys.stderr)
            return 2
        print(table(found[-1:])[-1], flush=True)
    met = sum(is_met(one) for _, one in found)
    first = [
        "Two replicas of a GPT-2 with 0.19 or 5.8 million parameters train on two nodes, with the"
        " default fragments and fp4. How often do they exchange, and for which share of the time"
        " does training compute?",
        "",
        f"**Found:** at least {LEAST_UTILIZATION:.0%} in {met} of {len(found)} cells.",
        "",
        *table(found),
    ]
    body = [
        "## Method",
        "",
        f"{_STEPS['0.19M']} or {_STEPS['5.8M']} steps, twice as many with a link that"
        " changes; `OMP_NUM_THREADS=1`, two nodes on two cores. *Computing* is one minus the"
        " time that the training thread spends in Streaming DiLoCo's"
        " work after a step, waits included, over the time of the steps: of whole cycles, from one"
        " cycle after the last change on, on the node that computes most: the other one's steps are"
        " shorter here, by a few percent, so it also waits for this one, whatever H is. It does not"
        " count what the thread that sends takes from the training thread's core. *Later*: both"
        " links change after half of the steps. The bound of 99 % was set before the run.",
    ]
    write_page(options.page, result_page(TITLE, first, [block], body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
