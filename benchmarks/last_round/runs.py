"""The runs of this benchmark, and how to make one.

A separate module, because the processes of the pool cannot import `__main__`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product

from benchmarks.common.pretraining import Config, composed
from benchmarks.common.runs import MISSING
from benchmarks.last_round.simulated import LAST_ROUNDS, train
from benchmarks.quality.grid import DEFAULTS, TUNED, OuterByM, Run, Size, cells
from benchmarks.quality.grid import Losses as GridLosses

SETTINGS: dict[str, OuterByM] = {"the defaults": DEFAULTS, "tuned": TUNED}


@dataclass(frozen=True)
class End(Run):
    """A run of the quality grid that ends with one of `LAST_ROUNDS`."""

    last_round: str = "mean"


Losses = dict[End, float]


def planned(grid_losses: GridLosses, seeds: int) -> Iterator[Run]:
    """Yield the runs in order: default settings first, all cells of one seed before the next."""
    for outer, seed in product(SETTINGS.values(), range(1, seeds + 1)):
        yield from cells(grid_losses, "fp4", seed, outer)


def done(losses: Losses) -> dict[Run, float]:
    """Return the runs with all last rounds, and their loss after the mean."""
    runs = {_run(end): loss for end, loss in losses.items() if end.last_round == "mean"}
    return {run: loss for run, loss in runs.items() if all(e in losses for e in ends(run))}


def ends(run: Run) -> list[End]:
    """Return a run with each last round."""
    return [End(**asdict(run), last_round=name) for name in LAST_ROUNDS]


def _run(end: End) -> Run:
    return Run(**{field.name: getattr(end, field.name) for field in fields(Run)})


def configuration(run: Run, size: Size, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run with the global batch, as plain values."""
    batch = f"data.batch_size={size.blocks_per_step}"
    return composed([*run.overrides(size), batch, *overrides])


def losses_of(run: Run, size: Size, overrides: Sequence[str]) -> dict[str, float]:
    """Make one run; return its validation loss in nats per token after each last round."""
    return train(configuration(run, size, overrides))


def differences(losses: Losses, runs: Sequence[Run]) -> list[float]:
    """Return the loss after the outer step minus the loss after the mean, by seed."""
    at = [{end.last_round: losses.get(end) for end in ends(run)} for run in runs]
    pairs = [(losses_by_end["outer"], losses_by_end["mean"]) for losses_by_end in at]
    return [outer - mean for outer, mean in pairs if outer is not None and mean is not None]


def winner(found: Sequence[float]) -> str:
    """Return the better end, or "neither" within the standard deviation over seeds."""
    if len(found) < 2:
        return "one seed" if found else MISSING
    mean = statistics.mean(found)
    if abs(mean) <= statistics.stdev(found):
        return "neither"
    return "mean" if mean > 0 else "outer step"
