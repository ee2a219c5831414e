"""What one node of the laboratory runs for `benchmarks.overlap`: all ways, steps in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lab import interface_counters
from benchmarks.overlap.link import SleepingChannel
from benchmarks.overlap.rounds import Entry, play_rounds
from benchmarks.overlap.trace import record
from benchmarks.overlap.ways import (
    SILENT,
    Model,
    Way,
    batch_of,
    by_torch,
    by_transformers,
    ours,
)
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger

TRACED = ("sync", "batch")


def build_ways(names: Sequence[str], model: Model) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the ways by name, and for those that this machine lacks the reason; collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    channel = Channel.open([list(range(size))], rank, Ledger())
    mesh = init_device_mesh("cpu", (size,))
    ways, missing = {}, {}
    for name in names:
        try:
            if name == "torch":
                ways[name] = by_torch(model.build(), mesh)
            elif name == "transformers":
                ways[name] = by_transformers(model.build(), mesh)
            else:
                own = SleepingChannel(size, Ledger()) if name in SILENT else channel
                ways[name] = ours(name, model.build(), own)
        except ImportError as error:  # an older transformers; the same on all nodes
            missing[name] = str(error)
    return ways, missing


def run(
    plan: dict[str, Any], folder: Path, sent_bytes: Callable[[], int] = lambda: 0
) -> list[dict[str, Any]]:
    """Measure what `plan` says in this process, a rank of a process group, and trace two ways.

    Args:
        plan: sizes of the `model`; `shapes`, each with `shape`, `rows` and `rounds`.
        folder: where this rank's traces go, as WAY.json; of the first shape.
        sent_bytes: what this node's interface has sent so far.

    Returns:
        A dictionary per shape: the shape, timings by row, reasons of rows that are missing.
    """
    model = Model(**plan["model"])
    names = list(dict.fromkeys(name for shape in plan["shapes"] for name in shape["rows"]))
    ways, missing = build_ways(names, model)
    measured = []
    for i, shape in enumerate(plan["shapes"]):
        tokens = batch_of(shape["shape"], model.vocabulary)
        entries = {name: Entry(ways[name]) for name in shape["rows"] if name in ways}
        timings = play_rounds(
            entries, tokens, shape["rounds"], fence=dist.barrier, sent_bytes=sent_bytes
        )
        rows = {name: asdict(timing) for name, timing in timings.items()}
        measured.append({"shape": shape["shape"], "rows": rows, "missing": missing})
        for name in TRACED if i == 0 else ():
            if name in entries:
                dist.barrier()
                record(ways[name], tokens, folder / f"{name}.json")
    return measured


def main() -> None:
    """Measure what the first argument says, as JSON; write to the folder in the second."""
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = run(plan, folder, lambda: interface_counters().sent_bytes)
    (folder / "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
