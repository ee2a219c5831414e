"""Job of one node of `benchmarks.overlap`: all methods, alternating step by step."""

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
from benchmarks.overlap.methods import (
    SILENT,
    Method,
    Model,
    batch_of,
    by_torch,
    by_transformers,
    ours,
)
from benchmarks.overlap.rounds import Entry, run_rounds
from benchmarks.overlap.trace import record
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger

TRACED = ("sync", "unsplit", "batch")


def build_methods(names: Sequence[str], model: Model) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the methods by name, and the reasons for unavailable ones; collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    channel = Channel.open([list(range(size))], rank, Ledger())
    mesh = init_device_mesh("cpu", (size,))
    methods, missing = {}, {}
    for name in names:
        try:
            if name == "torch":
                methods[name] = by_torch(model.build(), mesh)
            elif name == "transformers":
                methods[name] = by_transformers(model.build(), mesh)
            else:
                own = SleepingChannel(size, Ledger()) if name in SILENT else channel
                methods[name] = ours(name, model.build(), own)
        except ImportError as error:  # older transformers, the same on all nodes
            missing[name] = str(error)
    return methods, missing


def run(
    plan: dict[str, Any], folder: Path, sent_bytes: Callable[[], int] = lambda: 0
) -> list[dict[str, Any]]:
    """Measure a plan as one rank of a process group, and trace those in `TRACED`.

    Args:
        plan: sizes of the `model`; `shapes`, each with `shape`, `rows` and `rounds`.
        folder: for this rank's traces of the first shape, named METHOD.json.
        sent_bytes: returns the bytes sent by this node's interface so far.

    Returns:
        For each shape: the shape, timings by row, reasons for missing rows.
    """
    model = Model(**plan["model"])
    names = list(dict.fromkeys(name for shape in plan["shapes"] for name in shape["rows"]))
    methods, missing = build_methods(names, model)
    measured = []
    for i, shape in enumerate(plan["shapes"]):
        tokens = batch_of(shape["shape"], model.vocabulary)
        entries = {name: Entry(methods[name]) for name in shape["rows"] if name in methods}
        timings = run_rounds(
            entries, tokens, shape["rounds"], fence=dist.barrier, sent_bytes=sent_bytes
        )
        rows = {name: asdict(timing) for name, timing in timings.items()}
        measured.append({"shape": shape["shape"], "rows": rows, "missing": missing})
        for name in TRACED if i == 0 else ():
            if name in entries:
                dist.barrier()
                record(methods[name], tokens, folder / f"{name}.json")
    return measured


def main() -> None:
    """Measure the plan in the first argument; write to the folder in the second."""
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = run(plan, folder, lambda: interface_counters().sent_bytes)
    (folder / "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
