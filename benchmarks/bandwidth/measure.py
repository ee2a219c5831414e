"""Run the rows in the laboratory, round by round, and keep the results on disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.figures import BASELINES
from benchmarks.lab import NetLab

TORCHFT_ROWS = ("torchft", "torchft_delay", "torchft_often")
DDP_ROWS = ("ddp", "ddp_bf16")  # slow on a slow link
# torch's hook starts all-reduces in callbacks. On a busy machine two buckets may start in a
# different order on each rank; gloo then aborts, and with it all rows of the job.
MAY_ABORT = ("ddp_powersgd", "ddp_powersgd_1")
# By default, glibc keeps twice the size of the largest freed block and fetches the rest from the
# system in every step, so rows would differ by the sizes of their blocks. One heap, because each
# fit's thread would otherwise have its own; freed blocks below 32 MiB stay in it.
HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
JobsOfRound = Callable[[str, Sequence[str], int, argparse.Namespace], Iterator[Any]]
NODES = 2


class Results:
    """Raw results, written to disk after every row.

    Args:
        path: of the JSON file; may exist.
        settings: common to all records.
        block: provenance of the records that will be added.

    Raises:
        ValueError: the file was measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], block: Sequence[str] = ()) -> None:
        self._path, self._block = path, list(block)
        self._call: int | None = None  # listed once this call has measured something
        self.raw: dict[str, Any] = {"settings": settings, "made_by": [], "records": []}
        if path.exists():
            self.raw = json.loads(path.read_text())
            if self.raw["settings"] != settings:
                raise ValueError(
                    f"{path} was measured with {self.raw['settings']}, not with {settings}. Use"
                    " the same options, or another `--raw`."
                )

    @property
    def made_by(self) -> list[list[str]]:
        """The provenance of each call with at least one successful record."""
        blocks, records = self.raw["made_by"], self.raw["records"]
        calls = {r["call"] for r in records if not any(node["error"] for node in r["nodes"])}
        return [blocks[call] for call in sorted(calls)]

    def has(self, rate: str, row: str, round_: int, nodes: int = NODES) -> bool:
        """Return whether a row was measured in this round; a failed row is tried again."""
        return any(
            (r["rate"], r["row"], r["round"], len(r["nodes"])) == (rate, row, round_, nodes)
            and not any(node["error"] for node in r["nodes"])
            for r in self.raw["records"]
        )

    def add(self, rate: str, round_: int, nodes: Sequence[dict[str, Any]]) -> None:
        """Add one row of one round as measured by all nodes, replacing a failed attempt."""
        key = {"rate": rate, "row": nodes[0]["row"], "round": round_}
        others = [
            r
            for r in self.raw["records"]
            if not (key.items() <= r.items() and len(r["nodes"]) == len(nodes))
        ]
        if self._call is None:
            self._call = len(self.raw["made_by"])
            self.raw["made_by"].append(self._block)
        self.raw["records"] = [*others, {**key, "call": self._call, "nodes": list(nodes)}]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.raw, indent=1) + "\n")


def ddp_steps(rate: str, steps: int) -> int:
    """Return how many steps of DDP to measure; they are equal, and slow on a slow link."""
    return min(steps, {"20mbit": 3, "100mbit": 8}.get(rate, 20))


def jobs(rate: str, rows: Sequence[str], round_: int, options: argparse.Namespace) -> Iterator[Any]:
    """Yield the jobs of one round: a module, and its rows with the lengths of their windows.

    The rows of torchft are separate jobs, each with its baseline.
    """
    steps = dict.fromkeys(rows, options.cycles * options.sync_every)
    steps |= dict.fromkeys(("ddp_accumulate", *MAY_ABORT), options.steps)
    steps |= dict.fromkeys(DDP_ROWS, ddp_steps(rate, options.steps))
    fits = [row for row in rows if row not in TORCHFT_ROWS]
    yield from jobs_of_fits([(row, steps[row]) for row in fits], round_)
    for row in rows:
        if row in TORCHFT_ROWS:
            yield "benchmarks.bandwidth.torchft_job", _with_baseline(row, steps[row])


def jobs_of_fits(rows: Sequence[tuple[str, int]], round_: int) -> Iterator[Any]:
    """Yield a job in which the rows take turns, and one for each row that may abort.

    The latter takes turns with its baseline. The first row changes with the round.
    """
    together = [row for row in rows if row[0] not in MAY_ABORT]
    if together:
        first = round_ % len(together)
        yield "benchmarks.bandwidth.job", together[first:] + together[:first]
    for row in rows:
        if row[0] in MAY_ABORT:
            yield "benchmarks.bandwidth.job", _with_baseline(*row)


def _with_baseline(row: str, steps: int) -> list[tuple[str, int]]:
    return [(row, steps), (BASELINES[row], steps)]


def run_job(
    lab: NetLab, module: str, rows: Sequence[tuple[str, int]], options: argparse.Namespace
) -> list[list[dict[str, Any]]]:
    """Run one job on all nodes and return the measurements of each node for every row.

    If the job fails, the rows that not all nodes have measured by then have failed.
    """
    if module.endswith(".torchft_job") and find_spec("torchft") is None:
        error = "torchft is not installed: pip install -e '.[bench]' -c constraints.txt"
        return [_failed(row, steps, error) for row, steps in rows]
    nodes = len(lab.names)
    files = [options.raw.with_suffix(f".node{node}.jsonl").resolve() for node in range(nodes)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    plan = json.dumps({"rows": rows, "sync_every": options.sync_every, "size": options.size})
    commands = [[sys.executable, "-m", module, plan, str(file)] for file in files]
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **HEAP}
    results = lab.run(commands, timeout_s=options.timeout * len(rows), env=env)
    seen = [_windows(file) for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    bad = [result for result in results if result.returncode]
    error = "the job succeeded, but not every node has measured this row"
    if bad:
        # prefer a node that a signal ended: the others only lost their peer
        first = min(bad, key=lambda result: result.returncode)
        print(first.output, file=sys.stderr)
        error = _last_line(first.output, first.returncode)
    return [
        [windows[row] for windows in seen]
        if all(row in windows for windows in seen)
        else _failed(row, steps, error, nodes)
        for row, steps in rows
    ]


def _windows(file: Path) -> dict[str, dict[str, Any]]:
    """Return the measurements of one node by row."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {window["row"]: window for window in map(json.loads, lines)}


def _failed(row: str, steps: int, error: str, nodes: int = NODES) -> list[dict[str, Any]]:
    return [{"row": row, "steps": steps, "error": error}] * nodes


def _last_line(output: str, returncode: int) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f"exit code {returncode}, {lines[-1] if lines else 'no output'}"


def measure(
    results: Results, options: argparse.Namespace, jobs: JobsOfRound = jobs, nodes: int = NODES
) -> None:
    """Measure everything missing from `results`, round by round and rate by rate."""
    for round_ in range(options.rounds):
        for rate in options.rates:
            missing = [row for row in options.rows if not results.has(rate, row, round_, nodes)]
            for module, rows in jobs(rate, missing, round_, options):
                with NetLab(nodes, rate) as lab:
                    measured = run_job(lab, module, rows, options)
                for windows in measured:
                    results.add(rate, round_, windows)
                    print(f"{rate} round {round_} {_summary(windows)}", flush=True)


def _summary(nodes: Sequence[dict[str, Any]]) -> str:
    first = nodes[0]
    if first["error"]:
        return f"{first['row']}: {first['error']}"
    step_ms = 1e3 * max(node["seconds"] / node["steps"] for node in nodes)
    num_bytes = first["wire_bytes"] / first["steps"]
    return f"{first['row']}: {step_ms:.1f} ms, {num_bytes:,.0f} bytes per step"
