"""The runs of the last round as data, and how one is made.

Processes that are started for runs import this module, which `__main__` could not be for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.common.kept import MISSING
from benchmarks.last_round.played import LAST_ROUNDS, train
from benchmarks.lion_quality.played import Config
from benchmarks.quality.grid import DEFAULTS, TUNED, OuterByM, Run, Size, cells
from benchmarks.quality.grid import Losses as Others

CONF = Path(__file__).parents[2] / "conf"
SETTINGS: dict[str, OuterByM] = {"the defaults": DEFAULTS, "tuned": TUNED}


@dataclass(frozen=True)
class End(Run):
    """A run of the quality grid with one of `LAST_ROUNDS`."""

    last_round: str = "mean"


Losses = dict[End, float]


def planned(others: Others, seeds: int) -> Iterator[Run]:
    """Yield the runs in their order: all cells with one seed, then the next; defaults first."""
    for outer, seed in product(SETTINGS.values(), range(1, seeds + 1)):
        yield from cells(others, "fp4", seed, outer)


def done(losses: Losses) -> dict[Run, float]:
    """Return the runs of which every last round is known, with the mean's loss."""
    runs = {_run(end): loss for end, loss in losses.items() if end.last_round == "mean"}
    return {run: loss for run, loss in runs.items() if all(e in losses for e in ends(run))}


def ends(run: Run) -> list[End]:
    """Return a run with each of its last rounds."""
    return [End(**asdict(run), last_round=name) for name in LAST_ROUNDS]


def _run(end: End) -> Run:
    return Run(**{field.name: getattr(end, field.name) for field in fields(Run)})


def configuration(run: Run, size: Size, overrides: Sequence[str]) -> Config:
    """Return what `recipes.pretrain` would be given, with the global batch, as plain values."""
    batch = f"data.batch_size={size.blocks_per_step}"
    words = ["run_dir=none", *run.overrides(size), batch, *overrides]  # nothing is written there
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("pretrain", words)
    return cast(Config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def losses_of(run: Run, size: Size, overrides: Sequence[str]) -> dict[str, float]:
    """Make one run and return its validation loss in nats per token after each last round."""
    return train(configuration(run, size, overrides))


def new_pool(jobs: int) -> Executor:
    """Return so many processes of one thread each."""
    spawn = get_context("spawn")  # a fork would inherit this process's threads as locks
    return ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,))


def differences(losses: Losses, runs: Sequence[Run]) -> list[float]:
    """Return, seed by seed, the loss after the outer step minus that after the mean."""
    at = [{end.last_round: losses.get(end) for end in ends(run)} for run in runs]
    pairs = [(losses_by_end["outer"], losses_by_end["mean"]) for losses_by_end in at]
    return [outer - mean for outer, mean in pairs if outer is not None and mean is not None]


def winner(found: Sequence[float]) -> str:
    """Return which of the two is better by more than the seeds' spread, or "neither"."""
    if len(found) < 2:
        return "one seed" if found else MISSING
    mean = statistics.mean(found)
    if abs(mean) <= statistics.stdev(found):
        return "neither"
    return "mean" if mean > 0 else "outer step"
