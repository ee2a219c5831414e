"""Utilization over a grid of links, predicted and measured: `python -m benchmarks.grid`.

`predict` measures the links, a step, and a cycle on unshaped links, asks the planner, and writes
the page with the predictions. Commit it; then `measure` runs the cells that are missing and writes
their verdicts onto the page. It needs root and iproute2, and torchft for its rows (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.grid.cells import BASELINES, CAPACITY, FAST, NODES, PRIORITY, UNSHAPED, WIDE, Cell
from benchmarks.grid.measure import probe, run_rows
from benchmarks.grid.page import (
    TITLE,
    cycle_seconds,
    draw,
    opening,
    outcomes,
    page_lines,
    step_seconds,
)
from benchmarks.grid.predict import predicted, sync_seconds
from benchmarks.lab import LaboratoryUnavailable, exit_on_signals
from commfree_planner.tcp import SEGMENT

HERE = Path(__file__).parent
AT_ONCE = 2  # cells with a round trip, which mostly wait; others run alone
PROBE_S = 4  # of a probe without loss


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grid", description=__doc__)
    parser.add_argument("what", choices=("predict", "measure", "page"))
    parser.add_argument("--cells", nargs="+", help="names of cells to measure; default: all")
    parser.add_argument("--again", action="store_true", help="measure cells a second time")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds per cell")
    parser.add_argument("--nice", type=int, default=0, help="of the jobs, as other work may run")
    parser.add_argument("--folder", type=Path, default=HERE, help="of the page and its data")
    return parser.parse_args(arguments)


def predict(block: list[str]) -> dict[str, Any]:
    """Measure the planner's inputs and return them with the predictions."""
    links = {}
    for cell in (UNSHAPED, *FAST, *WIDE, CAPACITY):
        bits = PROBE_S * 1e6 * (cell.mbit or 5000) / (NODES - 1)
        # with loss, a few Mbit/s for each connection
        links[cell.name] = probe(cell, 10_000_000 if cell.round_trip_ms else round(bits / 8))
        print(cell.name, links[cell.name], flush=True)
    rows = run_rows(UNSHAPED, UNSHAPED.plan(), timeout_s=300)
    mbit = {cell.name: links[cell.name]["mbit"] for cell in (UNSHAPED, *FAST)}
    mbit |= {cell.name: (cell.mbit or 0) * SEGMENT / 1500 for cell in WIDE}
    step_s = {name: step_seconds(rows, name) for name in dict.fromkeys(BASELINES.values())}
    sync_s = {
        row: sync_seconds(
            row,
            UNSHAPED,
            _present(cycle_seconds(rows, row)),
            _present(step_s[baseline]),
            mbit[UNSHAPED.name],
        )
        for row, baseline in BASELINES.items()
    }
    inputs = {"step_s": step_s, "sync_s": sync_s, "mbit": mbit}
    return {
        "made_by": block,
        "links": links,
        "unshaped": rows,
        "inputs": inputs,
        "predicted": {
            cell.name: {row: predicted(row, cell, inputs) for row in cell.rows}
            for cell in (*FAST, *WIDE)
        },
    }


def _present(number: float | None) -> float:
    if number is None:
        raise SystemExit("a row failed on unshaped links; its output is above")
    return number


def measure(
    cells: Sequence[Cell], timeout_s: float, keep: Callable[[Cell, Mapping[str, Any]], None]
) -> None:
    """Measure cells; those with a round trip `AT_ONCE` at a time, the slowest first."""

    def run(cell: Cell) -> None:
        keep(cell, run_rows(cell, cell.plan(), timeout_s))
        print(f"measured {cell.name}", flush=True)

    for cell in cells:
        if not cell.round_trip_ms:
            run(cell)
    wide = [cell for cell in cells if cell.round_trip_ms]
    wide.sort(key=lambda cell: (cell.congestion != "cubic", -cell.round_trip_ms))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in [pool.submit(run, cell) for cell in wide]:
            future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, measure, or write the page only."""
    options = parse(arguments)
    exit_on_signals()
    os.environ[PRIORITY] = str(options.nice)
    page = options.folder / "result.md"
    prediction, results = options.folder / "predictions.json", options.folder / "result.json"
    block = provenance("grid", arguments, page)
    result: dict[str, Any] = {"made_by": [], "cells": {}, "again": {}}
    if results.exists():
        result |= json.loads(results.read_text())
    try:
        if options.what == "predict":
            _write(prediction, predict(block))
        elif options.what == "measure":
            lock = Lock()
            kept = result["again" if options.again else "cells"]

            def keep(cell: Cell, rows: Mapping[str, Any]) -> None:
                with lock:
                    kept[cell.name] = rows
                    if block not in result["made_by"]:
                        result["made_by"].append(block)
                    _write(results, result)

            missing = [
                cell
                for cell in (*FAST, *WIDE)
                if cell.name not in kept and (options.cells is None or cell.name in options.cells)
            ]
            measure(missing, options.timeout, keep)
    except (LaboratoryUnavailable, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    predictions = json.loads(prediction.read_text())
    found = outcomes(predictions, result["cells"])
    picture = page.with_suffix(".png")
    draw(found, picture)
    made_by = [predictions["made_by"], *result["made_by"]]
    body = page_lines(found, predictions, result)
    write_page(page, result_page(TITLE, opening(found, picture.name), made_by, body))
    return 0


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
