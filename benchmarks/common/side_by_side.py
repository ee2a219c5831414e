"""Runs of a bench side by side, each begun as soon as the results so far say that it is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from typing import TypeVar

R = TypeVar("R")
V = TypeVar("V")


def made(
    pool: Executor,
    jobs: int,
    losses: dict[R, float],
    planned: Callable[[], Iterable[R]],
    run: Callable[[R], V],
    seconds: float,
) -> Iterator[tuple[R, V]]:
    """Make what is missing and yield each run with what came of it when it is done.

    Args:
        pool: where `run` is called.
        jobs: how many at once.
        losses: of the runs so far; the caller adds each one that is yielded.
        planned: returns all runs in their order, as far as `losses` allows to know them.
        run: makes one; its validation loss, or several.
        seconds: begin no run later.
    """
    end = time.monotonic() + seconds
    flying: dict[Future[V], R] = {}
    while True:
        begun = {*losses, *flying.values()}
        free = jobs - len(flying) if time.monotonic() < end else 0
        # the plan names a run more than once where two tables share it
        due = dict.fromkeys(job for job in planned() if job not in begun)
        for job in islice(due, free):
            flying[pool.submit(run, job)] = job
        if not flying:
            return
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            yield flying.pop(future), future.result()
