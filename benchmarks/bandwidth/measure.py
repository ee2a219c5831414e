"""Fits side by side in the laboratory, round by round, and what is kept of them on disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.lab import NetLab

TORCHFT_ROWS = ("torchft", "torchft_delay")
DDP_ROWS = ("ddp", "ddp_bf16", "ddp_powersgd")
# torch's hook begins all-reduces in callbacks, and on a busy machine those of two buckets may come
# in another order on each rank; gloo then aborts, and with it all rows of the job
MAY_ABORT = ("ddp_powersgd",)
# Left to itself, glibc keeps twice as much freed memory as the largest block that came back, and
# a process fetches the rest anew in every step: rows would differ by the sizes of their blocks.
# One heap, for the fits' threads would each have another; freed blocks below 32 MiB stay in it.
HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
JobsOfRound = Callable[[str, Sequence[str], int, argparse.Namespace], Iterator[Any]]
NODES = 2


class Results:
    """The raw results, on disk after every row.

    Args:
        path: of the JSON file; may exist.
        settings: what every record was measured with.
        block: the provenance of what is added.

    Raises:
        ValueError: the file was measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], block: Sequence[str] = ()) -> None:
        self._path, self._block = path, list(block)
        self._call: int | None = None  # not in the list before it has measured something
        self.raw: dict[str, Any] = {"settings": settings, "made_by": [], "records": []}
        if path.exists():
            self.raw = json.loads(path.read_text())
            if self.raw["settings"] != settings:
                raise ValueError(
                    f"{path} was measured with {self.raw['settings']}, not with {settings}. Give"
                    " the same options, or another `--raw`."
                )
            self.raw.setdefault("made_by", [])  # a file of an older version

    @property
    def made_by(self) -> list[list[str]]:
        """The provenance of each call that has measured something that stands."""
        blocks, records = self.raw["made_by"], self.raw["records"]
        calls = {r.get("call") for r in records if not any(node["error"] for node in r["nodes"])}
        # an older version did not keep which call had measured
        return blocks if None in calls else [blocks[call] for call in sorted(calls)]

    def has(self, rate: str, row: str, round_: int, nodes: int = NODES) -> bool:
        """Return whether a row was measured in this round; one that failed is tried again."""
        return any(
            (r["rate"], r["row"], r["round"], len(r["nodes"])) == (rate, row, round_, nodes)
            and not any(node["error"] for node in r["nodes"])
            for r in self.raw["records"]
        )

    def add(self, rate: str, round_: int, nodes: Sequence[dict[str, Any]]) -> None:
        """Keep one row of one round, as all nodes measured it, in place of a failed attempt."""
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
    """Return how many steps of DDP to measure: all are alike, and long on a slow link."""
    return min(steps, {"20mbit": 3, "100mbit": 8}.get(rate, 20))


def jobs(rate: str, rows: Sequence[str], round_: int, options: argparse.Namespace) -> Iterator[Any]:
    """Yield the jobs of one round: a module, and its rows with the steps of their windows.

    torchft's rows are jobs of their own, in the first round only: they are there for comparison,
    and they take long.
    """
    steps = dict.fromkeys(rows, options.cycles * options.sync_every)
    steps |= dict.fromkeys(DDP_ROWS, ddp_steps(rate, options.steps))
    fits = [row for row in rows if row not in TORCHFT_ROWS]
    yield from jobs_of_fits([(row, steps[row]) for row in fits], round_)
    for row in rows:
        if row in TORCHFT_ROWS and round_ == 0:
            yield "benchmarks.bandwidth.torchft_job", [(row, steps[row])]


def jobs_of_fits(rows: Sequence[tuple[str, int]], round_: int) -> Iterator[Any]:
    """Yield a job in which the rows take turns, and one for each that may abort.

    Who begins changes with the round.
    """
    together = [row for row in rows if row[0] not in MAY_ABORT]
    if together:
        first = round_ % len(together)
        yield "benchmarks.bandwidth.job", together[first:] + together[:first]
    for row in rows:
        if row[0] in MAY_ABORT:
            yield "benchmarks.bandwidth.job", [row]


def run_job(
    lab: NetLab, module: str, rows: Sequence[tuple[str, int]], options: argparse.Namespace
) -> list[list[dict[str, Any]]]:
    """Run one job on all nodes and return, for every row, what each node measured.

    A row that no node, or not every node, has measured when the job fails has failed with it.
    """
    if module.endswith(".torchft_job") and find_spec("torchft") is None:
        error = "torchft is not installed: pip install -e '.[bench]' -c constraints.txt"
        return [_failed(row, steps, error) for row, steps in rows]
    nodes = len(lab.names)
    files = [options.raw.with_suffix(f".node{node}.jsonl").resolve() for node in range(nodes)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    plan = json.dumps({"rows": rows, "sync_every": options.sync_every})
    commands = [[sys.executable, "-m", module, plan, str(file)] for file in files]
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **HEAP}
    results = lab.run(commands, timeout_s=options.timeout * len(rows), env=env)
    seen = [_windows(file) for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    bad = [result for result in results if result.returncode]
    error = "the job ended well, but not every node has measured it"
    if bad:
        first = min(bad, key=lambda result: result.returncode)  # a signal: the others lost a peer
        print(first.output, file=sys.stderr)
        error = _last_line(first.output, first.returncode)
    return [
        [windows[row] for windows in seen]
        if all(row in windows for windows in seen)
        else _failed(row, steps, error, nodes)
        for row, steps in rows
    ]


def _windows(file: Path) -> dict[str, dict[str, Any]]:
    """Return what one node measured, by row."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {window["row"]: window for window in map(json.loads, lines)}


def _failed(row: str, steps: int, error: str, nodes: int = NODES) -> list[dict[str, Any]]:
    return [{"row": row, "steps": steps, "error": error}] * nodes


def _last_line(output: str, returncode: int) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f"exit code {returncode}, {lines[-1] if lines else 'without a word'}"


def measure(
    results: Results, options: argparse.Namespace, jobs: JobsOfRound = jobs, nodes: int = NODES
) -> None:
    """Measure what `results` lacks: round by round, rate by rate."""
    for round_ in range(options.rounds):
        for rate in options.rates:
            lacking = [row for row in options.rows if not results.has(rate, row, round_, nodes)]
            for module, rows in jobs(rate, lacking, round_, options):
                with NetLab(nodes, rate) as lab:
                    measured = run_job(lab, module, rows, options)
                for windows in measured:
                    results.add(rate, round_, windows)
                    print(f"{rate} round {round_} {_shown(windows)}", flush=True)


def _shown(nodes: Sequence[dict[str, Any]]) -> str:
    first = nodes[0]
    if first["error"]:
        return f"{first['row']}: {first['error']}"
    step_ms = 1e3 * max(node["seconds"] / node["steps"] for node in nodes)
    num_bytes = first["wire_bytes"] / first["steps"]
    return f"{first['row']}: {step_ms:.1f} ms, {num_bytes:,.0f} bytes a step"
