"""Ranks of a replica: `python -m benchmarks.layouts.job PLAN FOLDER`.

Started by `benchmarks.layouts`. The ranks are forked, to share the loaded libraries; each writes
its result to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.layouts import memory


def _forked(rank: int, plan: dict[str, Any], folder: Path) -> None:
    size = str(plan["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = memory.every_row(plan, folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks."""
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    start_processes(_forked, (plan, folder), nprocs=plan["ranks"], start_method="fork")


if __name__ == "__main__":
    main()
