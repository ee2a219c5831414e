"""Job of the ranks of one node: `python -m benchmarks.layouts.job WORK PLAN FOLDER`.

Started by `benchmarks.layouts`. The ranks are forked, to share the loaded libraries; each writes
its result to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.layouts import large, link, memory

# takes the plan and a folder for its files; returns JSON values
WORK: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "memory": memory.every_row,
    "link": link.every_row,
    "large": large.one_fit,
}


def work(name: str, plan: dict[str, Any], folder: Path) -> None:
    """Run the work of one rank, whose environment is set, and write its result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = WORK[name](plan, folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _forked(local_rank: int, ranks: int, name: str, plan: dict[str, Any], folder: Path) -> None:
    node, nodes = (int(os.environ[variable]) for variable in ("GROUP_RANK", "WORLD_SIZE"))
    os.environ |= {
        "RANK": str(node * ranks + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    work(name, plan, folder)


def main() -> None:
    """Fork the ranks of this node; the environment is that of a job of one process per node."""
    name, plan, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    ranks = plan["ranks"]
    start_processes(_forked, (ranks, name, plan, folder), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
