"""The runs of the last round as data, and how one is made.

Processes that are started for runs import this module, which `__main__` could not be for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product

from benchmarks.common.kept import MISSING
from benchmarks.common.pretraining import Config, composed
from benchmarks.last_round.played import LAST_ROUNDS, train
from benchmarks.quality.grid import DEFAULTS, TUNED, OuterByM, Run, Size, cells
from benchmarks.quality.grid import Losses as Others

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
    return composed([*run.overrides(size), batch, *overrides])


def losses_of(run: Run, size: Size, overrides: Sequence[str]) -> dict[str, float]:
    """Make one run and return its validation loss in nats per token after each last round."""
    return train(configuration(run, size, overrides))


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
