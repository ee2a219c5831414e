"""Run the jobs of a cell in the laboratory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bandwidth.measure import HEAP
from benchmarks.grid.cells import NODES, Cell
from benchmarks.lab import NetLab

PROBE = [sys.executable, "-m", "benchmarks.grid.probe"]
ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **HEAP}
ECHOES = 4000  # 0.1 % in each direction loses 8


def laboratory(cell: Cell) -> NetLab:
    """Return the laboratory of a cell."""
    return NetLab(
        NODES,
        cell.rate,
        round_trip_s=cell.round_trip_ms / 1e3,
        loss=cell.loss,
        congestion=cell.congestion,
    )


def run_rows(
    cell: Cell, plan: Sequence[tuple[str, int, bool]], timeout_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Run a plan (`Cell.plan`); return what all nodes measured, by row.

    A row that not all nodes have measured is missing; the output of a failed node is printed.
    """
    with TemporaryDirectory() as folder, laboratory(cell) as lab:
        files = [Path(folder) / f"node{node}.jsonl" for node in range(NODES)]
        words = [sys.executable, "-m", "benchmarks.grid.job", json.dumps(plan)]
        results = lab.run([[*words, str(file)] for file in files], timeout_s, env=ENV)
        for result in results:
            if result.returncode:
                print(result.output[-3000:], file=sys.stderr)
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
    by_node = [{one["row"]: one for one in map(json.loads, written)} for written in lines]
    return {
        row: [measured[row] for measured in by_node]
        for row, _, _ in plan
        if all(row in measured for measured in by_node)
    }


def probe(cell: Cell, num_bytes: int) -> dict[str, float]:
    """Measure a cell's links: round trip and loss of datagrams, and throughput between all nodes.

    Args:
        cell: the link.
        num_bytes: that every node sends to every other node.

    Returns:
        `median_ms` and `lost` of datagrams from node 0 to node 1 and back, and `mbit`, the data
        that a node sends per second until the last node is done, in Mbit/s.

    Raises:
        RuntimeError: a node has failed.
    """
    with laboratory(cell) as lab:
        found: dict[str, float] = {}
        for words in (["echo", str(ECHOES)], ["exchange", str(num_bytes)]):
            results = lab.run([[*PROBE, *words]] * NODES, timeout_s=300)
            failed = [result.output for result in results if result.returncode]
            if failed:
                raise RuntimeError(f"the probe of {cell.name} has failed: {failed[0]}")
            outputs = [json.loads(result.output) for result in results]
            if words[0] == "echo":
                found |= outputs[0]
            else:
                seconds = max(one["seconds"] for one in outputs)
                found["mbit"] = (NODES - 1) * num_bytes * 8e-6 / seconds
    return found
