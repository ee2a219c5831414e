"""Runs of a bench side by side, each begun as soon as the results so far say that it is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from typing import TypeVar

import torch

R = TypeVar("R")
V = TypeVar("V")


def made(
    pool: Executor,
    jobs: int,
    losses: dict[R, float],
    planned: Callable[[], Iterable[R]],
    make: Callable[[R], V],
    seconds: float,
) -> Iterator[tuple[R, V]]:
    """Make what is missing and yield each run with what came of it when it is done.

    Args:
        pool: where `make` is called.
        jobs: how many at once.
        losses: of the runs so far; the caller adds each one that is yielded.
        planned: returns all runs in their order, as far as `losses` allows to know them.
        make: makes one; its validation loss, or several.
        seconds: begin no run later.
    """
    end = time.monotonic() + seconds
    flying: dict[Future[V], R] = {}
    while True:
        begun = {*losses, *flying.values()}
        free = jobs - len(flying) if time.monotonic() < end else 0
        # the plan names a run more than once where two tables share it
        due = dict.fromkeys(run for run in planned() if run not in begun)
        for run in islice(due, free):
            flying[pool.submit(make, run)] = run
        if not flying:
            return
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            yield flying.pop(future), future.result()


def new_pool(jobs: int) -> Executor:
    """Return so many processes of one thread each."""
    spawn = get_context("spawn")  # a fork would inherit this process's threads as locks
    return ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,))
