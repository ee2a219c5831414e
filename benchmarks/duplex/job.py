"""Job of one node of `benchmarks.duplex`: gathers through both kinds of channel, alternately."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger

LATE_S = 0.02  # delay of one rank after the others, as in training


def gather_s(channel: Channel, num_bytes: int, late: bool) -> float:
    """Return the seconds of a gather on this rank; if `late`, it launches after the others."""
    values = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    time.sleep(LATE_S * (1 + late))
    start = time.perf_counter()
    channel.all_gather(values, "bench").wait()
    return time.perf_counter() - start


def main() -> None:
    """Measure the plan in the first argument; append the late rank's seconds to the second one."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    kinds = {
        kind: Channel.open([list(range(size))], rank, Ledger(), full_duplex=kind == "two")
        for kind in ("one", "two")
    }
    for round_ in range(plan["rounds"]):
        for num_bytes in plan["sizes"]:
            for kind, channel in kinds.items():
                late = rank == round_ % size
                seconds = gather_s(channel, num_bytes, late)
                if late:  # the others' times include waiting for this rank
                    with path.open("a") as file:
                        file.write(json.dumps([kind, num_bytes, seconds]) + "\n")
    for channel in kinds.values():
        channel.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
