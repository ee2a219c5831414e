"""Results of a grid of runs, kept between calls, and the loop that makes the missing runs.

A *run* is a frozen dataclass of plain values that identifies one training run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

R = TypeVar("R")
V = TypeVar("V")

MISSING = "missing"


@dataclass
class Results(Generic[R]):
    """The results so far.

    Attributes:
        setting: common to all runs; results of different settings cannot share a file.
        losses: validation loss of each run, nats per token.
        made_by: provenance of each call that made runs, one block of lines per call.
    """

    setting: dict[str, Any]
    losses: dict[R, float] = field(default_factory=dict)
    made_by: list[list[str]] = field(default_factory=list)

    def add(self, run: R, loss: float, block: list[str]) -> None:
        """Add a run and its provenance."""
        self.losses[run] = loss
        if block not in self.made_by:
            self.made_by.append(block)


def load(path: Path, setting: dict[str, Any], kind: type[R]) -> Results[R]:
    """Load the results so far; without a file, return empty results.

    Args:
        path: of the JSON file.
        setting: of plain values, as `json` returns them.
        kind: dataclass of the runs.

    Raises:
        ValueError: the file contains results of another setting.
    """
    if not path.exists():
        return Results(setting)
    stored = json.loads(path.read_text())
    if stored["setting"] != setting:
        raise ValueError(
            f"{path} contains results of the setting {stored['setting']}, but this call uses"
            f" {setting}. Use that setting, or another file with `--results`."
        )
    losses = {kind(**entry["run"]): entry["validation_loss"] for entry in stored["runs"]}
    return Results(setting, losses, stored["made_by"])


def save(path: Path, results: Results[Any]) -> None:
    """Write all results atomically."""
    runs = [{"run": asdict(run), "validation_loss": loss} for run, loss in results.losses.items()]
    stored = {"setting": results.setting, "made_by": results.made_by, "runs": runs}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(stored, indent=1) + "\n")
    partial.replace(path)


def mean_text(values: Sequence[float], form: str, unit: str = "") -> str:
    """Format the mean, with the standard deviation if there are several values."""
    if not values:
        return MISSING
    spread = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}{unit}"


def run_missing(
    pool: Executor,
    jobs: int,
    losses: dict[R, float],
    planned: Callable[[], Iterable[R]],
    make: Callable[[R], V],
    seconds: float,
) -> Iterator[tuple[R, V]]:
    """Make the missing runs and yield each with its result as it finishes.

    Args:
        pool: executes `make`.
        jobs: number of concurrent runs.
        losses: of finished runs; the caller adds each run that is yielded.
        planned: returns all runs in order, as far as `losses` determines them: a learning-rate
            search plans its next run from the losses of the previous ones.
        make: makes one run and returns its validation loss or losses.
        seconds: start no run later than this.
    """
    end = time.monotonic() + seconds
    running: dict[Future[V], R] = {}
    while True:
        started = {*losses, *running.values()}
        free = jobs - len(running) if time.monotonic() < end else 0
        # a run shared by two tables is planned twice
        due = dict.fromkeys(run for run in planned() if run not in started)
        for run in islice(due, free):
            running[pool.submit(make, run)] = run
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


def new_pool(jobs: int) -> Executor:
    """Return a pool of single-threaded processes."""
    spawn = get_context("spawn")  # a fork would inherit locks held by this process's threads
    return ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,))
