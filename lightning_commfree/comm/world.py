"""The process group of all ranks, where the framework's own way to make it does not do.

It sends nothing by itself: what goes through it is the framework's.
"""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

StoreError = dist.DistStoreError  # other ranks have not come until the timeout
PATIENCE: timedelta = dist.constants.default_pg_timeout  # of groups of which nobody says more


_LAST_DROPS_S = 0.05


def leave_time_at_exit() -> None:
    """Let this process end a moment later, once gloo's threads hold nothing of Python's.

    A thread of gloo's may be the last to hold a collective that is over. To drop its tensors it
    waits for the interpreter's lock. If the interpreter is torn down by then, the thread is ended
    in the midst of C++, and the process is aborted behind a good fit. Frameworks leave gloo's
    groups open to the end.
    """
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    if dist.is_initialized():
        time.sleep(_LAST_DROPS_S)  # without the lock


def default_backend(device: torch.device) -> str:
    """Return the backend of process groups for tensors on a device."""
    return str(dist.get_default_backend_for_device(device))


def attempt() -> int:
    """Return how often torchrun has restarted this job; 0 without torchrun or a restart."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0  # every attempt has a store of its own
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_restarted_world(
    backend: str, rank: int, size: int, timeout: timedelta | None, device: torch.device
) -> None:
    """Make the default process group of a job that torchrun has restarted.

    1. torchrun keeps one store through all attempts. In it stand the addresses of ranks of the
       attempt before, which are gone.
    2. Ranks that look for each other find those and fail, or wait for their timeout.

    Here the keys of each attempt have a prefix of their own. Other jobs are left as they are.

    Args:
        backend: of the group.
        rank: of this process.
        size: of the world.
        timeout: of the group; None for torch's.
        device: of this rank; nccl is bound to it.
    """
    if not attempt() or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timeout or dist.constants.default_pg_timeout
    agents = dist.TCPStore(host, port, size, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"attempt_{attempt()}", agents)  # type: ignore[attr-defined]
    bound: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, **bound
    )
