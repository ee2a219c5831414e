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
    for is_last in (False, True):
        outcomes = _run_once(function, size, folder, args)
        # on a busy machine, gloo rarely fails to connect the ranks: not what is tested here
        if is_last or all(began for began, _, _ in outcomes):
            break
    failures = [(rank, text) for rank, (_, text, _) in enumerate(outcomes) if text]
    if failures:
        raise RuntimeError("\n".join(f"rank {rank} failed:\n{text}" for rank, text in failures))
    return [result for _, _, result in outcomes]


def _run_once(
    function: Callable[..., Any], size: int, folder: Path, args: Any
) -> list[tuple[bool, str, Any]]:
    """Return whether each rank began `function`, its traceback or "", and its result."""
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
    return [torch.load(folder / f"outcome_{rank}.pt", weights_only=False) for rank in range(size)]


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


def _play(
    rank: int, function: Callable[..., Any], size: int, port: int, folder: Path, args: Any
) -> None:
    try:
        become_rank(rank, size, port, TIMEOUT)
    except RuntimeError:
        torch.save((False, traceback.format_exc(), None), folder / f"outcome_{rank}.pt")
        return
    try:
        outcome = (True, "", function(rank, size, *args))
    except Exception:  # noqa: BLE001 - whatever it is, the parent shows it
        outcome = (True, traceback.format_exc(), None)
    torch.save(outcome, folder / f"outcome_{rank}.pt")
    dist.destroy_process_group()
