"""Threads and forks do not mix: what a recipe does so that forked workers may compute."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from typing_extensions import override


class ThreadsAfterFork(pl.Callback):
    """Keeps this process to one thread now, and gives the workers that are forked from it theirs.

    OpenMP's threads do not survive a fork, and GNU's library does not notice: a worker whose parent
    has ever computed with several waits for them for ever. Copying weights is enough, which is what
    the parent does after every fit: the second job of a multirun would hang. So the process that
    forks must not start any. Make this callback before the model.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # set by the user, or else in every forked worker by Lightning: its share of the cores
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", self._threads)))
