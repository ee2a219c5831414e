"""How one run of Lion's quality grid is made.

Processes that are started for runs import this module, which `__main__` could not be for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.pretraining import Config, composed
from benchmarks.lion_quality.grid import Run
from benchmarks.lion_quality.played import train


def configuration(run: Run, steps: int, overrides: Sequence[str]) -> Config:
    """Return what `recipes.pretrain` would be given for a run, in plain dicts and lists."""
    return composed([*run.overrides(steps), *overrides])


def loss_of(run: Run, steps: int, overrides: Sequence[str]) -> float:
    """Make one run and return its validation loss in nats per token."""
    return train(configuration(run, steps, overrides), run.workers, run.vote)
