"""How long an operation takes, on a device that works on its own as well."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from the call to the end of what it makes `device` do."""
    _finish(device)
    start = time.perf_counter()
    operation()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
