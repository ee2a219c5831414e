"""Real gloo processes for tests: `run_ranks` plays a function on n ranks, forked, and hands back
what each returned."""

from __future__ import annotations

import os
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


# Below the kernel's ephemeral ports, which gloo uses: nothing takes a port between the moment it is
# found free and the moment a rank listens on it. Drawn with the system's randomness, so that two
# test runs on one machine draw different ports, whatever their seeds.
_PORTS, _DRAW = range(20_000, 32_000), random.SystemRandom()


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    while True:
        port = _DRAW.choice(_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_ranks(function: Callable[..., Any], size: int, folder: Path, *args: Any) -> list[Any]:
    """Run `function(rank, size, *args)` on `size` forked gloo ranks; return the results by rank.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    assert not dist.is_initialized(), "a fork from a process that holds a process group hangs"
    context = mp.start_processes(
        _play,
        (function, size, free_port(), folder, args),
        nprocs=size,
        join=False,
        daemon=True,
        start_method="fork",
    )
    while not context.join():
        pass
    files = [folder / f"outcome_{rank}.pt" for rank in range(size)]
    outcomes = [torch.load(file, weights_only=False) for file in files]
    failures = [(rank, text) for rank, (text, _) in enumerate(outcomes) if text]
    if failures:
        raise RuntimeError("\n".join(f"rank {rank} failed:\n{text}" for rank, text in failures))
    return [result for _, result in outcomes]


def become_rank(rank: int, size: int, port: int, timeout: timedelta) -> None:
    """Make this forked process a gloo rank of a world whose rank 0 listens on `port`."""
    torch.set_num_threads(1)
    # as torchrun would set them, so that a Trainer in here finds its rank and launches nothing
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        TORCHELASTIC_RUN_ID="test",
    )
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
    dist.barrier()  # a rank that closes its sockets at once breaks those that still connect


def _play(
    rank: int, function: Callable[..., Any], size: int, port: int, folder: Path, args: Any
) -> None:
    become_rank(rank, size, port, TIMEOUT)
    try:
        outcome = "", function(rank, size, *args)
    except Exception:  # noqa: BLE001 - whatever it is, the parent shows it
        outcome = traceback.format_exc(), None
    torch.save(outcome, folder / f"outcome_{rank}.pt")
    dist.destroy_process_group()
