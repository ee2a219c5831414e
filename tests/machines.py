"""Forked processes on machines of their own: `run_on_nodes` plays a function in every node of a
laboratory, and none of them has to import anything again."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.lab import NetLab

CLONE_NEWNET = 0x4000_0000  # of linux/sched.h; `os.setns` comes with Python 3.12


def run_on_nodes(
    lab: NetLab, function: Callable[[int], None], nodes: int, folder: Path, timeout_s: float
) -> list[str]:
    """Run `function(node)` in each node, forked; return what each process wrote."""
    files = [folder / f"node{node}.txt" for node in range(nodes)]
    fork = multiprocessing.get_context("fork")
    jobs = [
        fork.Process(target=_play, args=(lab, function, node, file), daemon=True)
        for node, file in enumerate(files)
    ]
    for job in jobs:
        job.start()
    deadline = time.monotonic() + timeout_s
    for job in jobs:
        job.join(max(0.0, deadline - time.monotonic()))
        job.kill()
        job.join()
    return [file.read_text() for file in files]


def _play(lab: NetLab, function: Callable[[int], None], node: int, file: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{lab._namespace(node)}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(lab.environment(node))
    with file.open("w", buffering=1) as sys.stdout:
        sys.stderr = sys.stdout
        function(node)
