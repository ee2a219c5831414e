"""Processes of `benchmarks.sync_cost`, each of which is a replica that only syncs.

Started by that command: `python -m benchmarks.sync_cost.job JOB FOLDER`, where JOB is a `SyncJob`
or a `MemoryJob` as JSON. Every rank writes its results to FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import FixedMembership
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    default_outer_optimizer,
    split_into_fragments,
)

PHASES = ("launch", "exchange", "land")
LOOPBACK = "lo"
_SYNC_EVERY = 2  # launch after every second step, land after the next one


class SyncJob(NamedTuple):
    """A measurement of syncs; `changes` are `DiLoCoSettings`.

    With `own_network`, the caller starts it in an empty network namespace.
    """

    replicas: int
    numel: int
    rounds: int
    changes: dict[str, Any]
    own_network: bool


class MemoryJob(NamedTuple):
    """A measurement of the memory of one replica; `changes` are `DiLoCoSettings`."""

    ranks: int
    numel: int
    changes: dict[str, Any]


def run_replicas(job: SyncJob, folder: Path) -> None:
    """Run all replicas of a job; each writes `RANK.json`."""
    if job.own_network:
        subprocess.run(["ip", "link", "set", LOOPBACK, "up"], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    start_processes(_replica, (job, folder), nprocs=job.replicas, start_method="fork")


def run_ranks(job: MemoryJob, folder: Path) -> None:
    """Run the ranks of one replica; each writes `RANK.json`."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    start_processes(_rank_of_replica, (job, folder), nprocs=job.ranks, start_method="fork")


def start(
    module: nn.Module, channel: Channel, replica: Channel | None = None, **changes: Any
) -> StreamingDiLoCo:
    """Return the algorithm for a model that is one fragment; `replica` is the channel within it."""
    defaults: dict[str, Any] = {
        "sync_every": _SYNC_EVERY,
        "num_fragments": 1,
        "fragment_pattern": "balanced",
        "overlap_steps": 1,
        "mix": 0.5,
        "wire_dtype": "fp4",
        "outer_optimizer": default_outer_optimizer,
        "replica_size": 1,
    }
    settings = DiLoCoSettings(**{**defaults, **changes})
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    return StreamingDiLoCo(module, fragments, settings, FixedMembership(channel), replica)


def sync(module: nn.Module, diloco: StreamingDiLoCo, seed: int) -> dict[str, float]:
    """Change the parameters a little and sync once; return the CPU seconds of the phases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device), alpha=1e-3)
    while (diloco.step + 1) % _SYNC_EVERY:
        diloco.after_step()
    _barrier()  # so that no replica waits for a slower one in a measured phase
    launch_s = _cpu_seconds(diloco.after_step)
    exchange_s = _cpu_seconds(diloco.wait_in_flight)
    land_s = _cpu_seconds(diloco.after_step)
    assert not diloco.in_flight, "a sync ends with its landing"
    return dict(zip(PHASES, (launch_s, exchange_s, land_s), strict=True))


def measure_memory(job: MemoryJob, replica: Channel | None = None) -> dict[str, float]:
    """Return bytes per parameter of this rank's outer state after a first landing.

    There is one replica; its parameters are on a GPU if there is one.

    Returns:
        `host` and `gpu`: the memory of global copy and outer optimizer, summed over distinct
        storages; `resident`: growth of the process's resident set from before the creation of
        `StreamingDiLoCo` until after its first landing, the minimum within a second.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warm_up = nn.ParameterList([torch.zeros(1000, device=device)])
    _landed(warm_up, job, replica)  # triggers torch's lazy loading
    module = nn.ParameterList([torch.ones(job.numel, device=device)])
    before = _resident_bytes()
    diloco = _landed(module, job, replica)
    found = {"host": 0.0, "gpu": 0.0, "resident": (_least_resident_bytes() - before) / job.numel}
    storages = {t.data_ptr(): t for t in map(Tensor.untyped_storage, outer_state(diloco))}
    for storage in storages.values():
        where = "host" if storage.device.type == "cpu" else "gpu"
        found[where] += storage.nbytes() / job.numel
    diloco.close()
    return found


def bytes_on_the_interface() -> int:
    """Return the bytes sent over loopback in the network namespace of this process.

    It reads /proc/self, because /sys/class/net shows the namespace in which /sys was mounted.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(counters.split()[8])
    raise RuntimeError(f"there is no interface `{LOOPBACK}`")


def _replica(rank: int, job: SyncJob, folder: Path) -> None:
    torch.set_num_threads(1)
    ledger = Ledger()
    channel = _open(rank, job.replicas, ledger, folder)
    module = nn.ParameterList([torch.zeros(job.numel)])
    diloco = start(module, channel, **job.changes)
    sync(module, diloco, rank)  # not counted: creates connections and buffers
    cpu_s: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def counted_sync() -> None:
        for phase, seconds in sync(module, diloco, rank).items():
            cpu_s[phase].append(seconds)

    before = ledger.bytes_sent
    seen = {
        "idle_bytes": _crossing(_barrier, job),
        "interface_bytes": _crossing(counted_sync, job),
        "ledger_bytes": ledger.bytes_sent - before,
        "predicted_bytes": diloco.bytes_per_cycle,
        "cpu_s": cpu_s,
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    diloco.close()
    _leave()


def _rank_of_replica(rank: int, job: MemoryJob, folder: Path) -> None:
    torch.set_num_threads(1)
    replica = _open(rank, job.ranks, Ledger(), folder)
    (folder / f"{rank}.json").write_text(json.dumps(measure_memory(job, replica)))
    _leave()


def _open(rank: int, size: int, ledger: Ledger, folder: Path) -> Channel:
    if size > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    return Channel.open([list(range(size))], rank, ledger, full_duplex=True)


def _leave() -> None:
    _barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _crossing(action: Callable[[], object], job: SyncJob) -> list[int] | None:
    """Run `action` once per round; return the bytes of all replicas on the interface, by round."""
    crossed = []
    for _ in range(job.rounds):
        _barrier()
        before = bytes_on_the_interface() if job.own_network else 0
        _barrier()
        action()
        _barrier()
        crossed.append(bytes_on_the_interface() - before if job.own_network else 0)
    return crossed if job.own_network else None


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _cpu_seconds(action: Callable[[], object]) -> float:
    start_s = time.process_time()  # of all threads, including gloo's
    action()
    return time.process_time() - start_s


def _landed(module: nn.Module, job: MemoryJob, replica: Channel | None) -> StreamingDiLoCo:
    diloco = start(module, Channel([0], 0, Ledger()), replica, **job.changes)
    sync(module, diloco, seed=0)
    return diloco


def outer_state(diloco: StreamingDiLoCo) -> list[Tensor]:
    """Return the tensors of the outer state that this rank holds."""
    tensors = [fragment.global_copy for fragment in diloco.fragments]
    for fragment in diloco.fragments:
        for state in fragment.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def _least_resident_bytes() -> int:
    """Return the resident set after gloo's threads have freed their buffers."""
    least = _resident_bytes()
    for _ in range(20):
        time.sleep(0.05)
        least = min(least, _resident_bytes())
    return least


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    """Run the job given on the command line."""
    fields, folder = json.loads(arguments[0]), Path(arguments[1])
    if "replicas" in fields:
        run_replicas(SyncJob(**fields), folder)
    else:
        run_ranks(MemoryJob(**fields), folder)


if __name__ == "__main__":
    main(sys.argv[1:])
