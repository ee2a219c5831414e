"""Measure the cost of a sync by number of replicas, and the memory of the outer state.

    python -m benchmarks.sync_cost

starts 1, 2, 4 and 8 gloo processes on loopback, each of which is a replica that only syncs: its
parameters change a little, and `StreamingDiLoCo` launches, waits and lands. Bytes come from the
ledger, from the prediction `bytes_per_cycle` and, if this machine allows a separate network for the
processes, from the counter of its interface. Times are CPU times of all threads of a process, so
that it does not matter how many processes share a core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.sync_cost.job import PHASES, MemoryJob, SyncJob
from lightning_commfree.diloco import CODECS

PAGE = Path(__file__).with_name("result.md")
TITLE = "How much does a sync cost, and how much memory does the outer state need?"
# by name on the page: ranks of the replica, settings, bytes per parameter by design
MEMORY_SETTINGS: dict[str, tuple[int, dict[str, Any], float]] = {
    "replica_size=1": (1, {}, 8.0),
    "replica_size=2": (2, {"replica_size": 2}, 4.0),
    "outer_device=cpu": (1, {"outer_device": "cpu"}, 8.0),
}
# makes glibc return freed tensors to the system, whatever their size
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}

HOW_TO_READ_SYNCS = """\
Per replica and sync; the whole model is one fragment. Predicted: `bytes_per_cycle`. Interface: the
bytes sent on the interface of the processes' own network during a sync, median over syncs, minus
those of the same number of barriers, divided by the number of replicas; it includes the headers of
TCP and IP. CPU time: median over replicas and syncs. *Launch* takes the outer gradient, hashes the
global copy (unless `check_drift_every` is 0) and encodes. *Exchange* is the work of gloo until all
data has arrived and, in an exchange by shards, of the thread that averages a shard and encodes it
again; it may start during *launch*. *Land* decodes, averages, takes the outer step and merges.
Replicas use an all-gather if it sends fewer bytes, and each then decodes the data of all replicas;
otherwise they exchange by shards."""
HOW_TO_READ_MEMORY = """\
Global copy and outer momentum after a first landing, fp32, in bytes per parameter, of the rank with
the most. There is one replica; its parameters are on a GPU if there is one. Host and GPU: summed
over the tensors' storages. Resident: growth of the process's resident set; without numba, a thread
also keeps 4 MB of scratch memory for encoding and decoding, independent of the model size."""


class SyncCost(NamedTuple):
    """Cost of one sync for a replica; `interface_bytes` is None without a separate network."""

    replicas: int
    ledger_bytes: float
    predicted_bytes: int
    interface_bytes: float | None
    cpu_s: dict[str, float]


def measure_sync(job: SyncJob) -> SyncCost:
    """Run the processes of one job.

    Raises:
        subprocess.CalledProcessError: a process failed; it has printed the reason.
    """
    prefix = ["unshare", "--net"] if job.own_network else []
    return cost_of(job, _run_job(prefix, job, job.replicas))


def cost_of(job: SyncJob, ranks: Sequence[dict[str, Any]]) -> SyncCost:
    """Combine the results of the ranks into the cost of one sync."""
    crossed = None
    if job.own_network:
        # the median excludes packets that TCP resends because a busy machine acknowledged them late
        synced, idle = (
            statistics.median(ranks[0][key]) for key in ("interface_bytes", "idle_bytes")
        )
        crossed = (synced - idle) / job.replicas
    cpu_s = {
        phase: statistics.median(s for rank in ranks for s in rank["cpu_s"][phase])
        for phase in PHASES
    }
    ledger_bytes = statistics.mean(rank["ledger_bytes"] for rank in ranks) / job.rounds
    return SyncCost(job.replicas, ledger_bytes, ranks[0]["predicted_bytes"], crossed, cpu_s)


def measure_memory(job: MemoryJob) -> dict[str, float]:
    """Run a memory job; return the largest value of each figure among its ranks."""
    ranks = _run_job([], job, job.ranks)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def why_no_network() -> str | None:
    """Return why this machine cannot create a separate network; None if it can."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "A separate network needs Linux with `unshare` and `ip`."
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "A separate network needs root." if probe.returncode else None


def opening(costs: Sequence[SyncCost], numel: int, picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    few, many = costs[0], costs[-1]
    return [
        "In a sync, each replica sends its outer gradient to the others, directly or by shards."
        " How do bytes and computation grow with the number of replicas?",
        "",
        f"- **Found:** with {many.replicas} replicas each sends {many.ledger_bytes / numel:.2f}"
        f" bytes per parameter and sync, and spends {1e3 * sum(many.cpu_s.values()):.0f} ms of CPU"
        f" time on {numel:,} parameters; with {few.replicas} it is {few.ledger_bytes / numel:.2f}"
        f" bytes and {1e3 * sum(few.cpu_s.values()):.0f} ms.",
        "- Ledger, prediction and network interface agree, except for the headers of TCP and IP.",
        "",
        f"![CPU time of a sync by number of replicas]({picture})",
    ]


def draw(costs: Sequence[SyncCost], path: Path) -> None:
    """Draw the CPU time of a sync as a PNG."""
    groups = {
        f"M = {cost.replicas}": {name: 1e3 * seconds for name, seconds in cost.cpu_s.items()}
        for cost in costs
    }
    draw_bars(path, "A sync of one replica", "ms of CPU time", groups)


def sync_lines(costs: Sequence[SyncCost], numel: int, changes: dict[str, Any]) -> list[str]:
    """Return the costs as Markdown lines."""
    return [
        "## A sync",
        "",
        f"{numel:,} parameters, {', '.join(f'`{k}={v}`' for k, v in changes.items())}.",
        HOW_TO_READ_SYNCS,
        "",
        "| replicas | bytes sent (ledger) | per parameter | predicted | interface"
        " | interface / ledger | CPU ms: " + " | ".join(PHASES) + " | sum |",
        "|---" * (7 + len(PHASES)) + "|",
        *(_sync_row(cost, numel) for cost in costs),
        "",
    ]


def _sync_row(cost: SyncCost, numel: int) -> str:
    crossed, ratio = "not counted", "--"
    if cost.interface_bytes is not None:
        crossed = f"{cost.interface_bytes:,.0f}"
        if cost.ledger_bytes:
            ratio = f"{cost.interface_bytes / cost.ledger_bytes:.4f}"
    milliseconds = [1e3 * cost.cpu_s[phase] for phase in PHASES]
    return (
        f"| {cost.replicas} | {cost.ledger_bytes:,.0f} | {cost.ledger_bytes / numel:.4f}"
        f" | {cost.predicted_bytes:,} | {crossed} | {ratio}"
        f" | {' | '.join(f'{ms:.1f}' for ms in milliseconds)} | {sum(milliseconds):.1f} |"
    )


def memory_lines(numel: int) -> list[str]:
    """Measure the memory of the outer state; return it as Markdown lines."""
    rows = []
    for name, (ranks, changes, design) in MEMORY_SETTINGS.items():
        found = measure_memory(MemoryJob(ranks, numel, changes))
        figures = (found["host"], found["gpu"], found["resident"], design)
        rows.append(f"| {name} | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    return [
        "## Memory",
        "",
        f"{numel:,} parameters.",
        HOW_TO_READ_MEMORY,
        "",
        "| setting | host | GPU | resident | design |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _run_job(prefix: Sequence[str], job: SyncJob | MemoryJob, size: int) -> list[dict[str, Any]]:
    """Run a job in new processes; return the results of its ranks."""
    command = [*prefix, sys.executable, "-m", "benchmarks.sync_cost.job", json.dumps(job._asdict())]
    environment = dict(os.environ)
    if isinstance(job, MemoryJob):
        environment |= RETURN_FREED_MEMORY
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, folder], check=True, env=environment)
        files = [Path(folder) / f"{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text()) for file in files]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], metavar="M")
    parser.add_argument("--numel", type=int, default=2**22, help="parameters (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="counted syncs (%(default)s)")
    parser.add_argument("--wire-dtype", choices=tuple(CODECS), default="fp4")
    parser.add_argument("--check-drift-every", type=int, default=1, help="%(default)s, or 0")
    parser.add_argument(
        "--memory-numel", type=int, default=2**25, help="parameters, for memory (%(default)s)"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if min(*options.replicas, options.numel, options.rounds, options.memory_numel) < 1:
        parser.error("replicas, --numel, --rounds and --memory-numel must all be 1 or more")
    block = provenance("sync_cost", arguments, options.page)
    reason = why_no_network()
    if reason is not None:
        print(f"{reason} Bytes on the interface are not counted.", file=sys.stderr)
    changes = {
        "wire_dtype": options.wire_dtype,
        "check_drift_every": options.check_drift_every,
    }
    costs = [
        measure_sync(SyncJob(replicas, options.numel, options.rounds, changes, reason is None))
        for replicas in options.replicas
    ]
    picture = options.page.with_suffix(".png")
    draw(costs, picture)
    body = [*sync_lines(costs, options.numel, changes), *memory_lines(options.memory_numel)]
    first = opening(costs, options.numel, picture.name)
    write_page(options.page, result_page(TITLE, first, [block], body))


if __name__ == "__main__":
    main()
