"""How one run of Lion's quality grid is made.

Processes that are started for runs import this module, which `__main__` could not be for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.lion_quality.grid import Run
from benchmarks.lion_quality.played import Config, train

CONF = Path(__file__).parents[2] / "conf"


def configuration(job: Run, steps: int, overrides: Sequence[str]) -> Config:
    """Return what `recipes.pretrain` would be given for a run, in plain dicts and lists."""
    words = ["run_dir=none", *job.overrides(steps), *overrides]  # nothing is written there
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("pretrain", words)
    return cast(Config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def run(job: Run, steps: int, overrides: Sequence[str]) -> float:
    """Make one run and return its validation loss in nats per token."""
    return train(configuration(job, steps, overrides), job.workers, job.vote)


def new_pool(jobs: int) -> Executor:
    """Return so many processes of one thread each."""
    spawn = get_context("spawn")  # a fork would inherit this process's threads as locks
    return ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,))
