"""Let forked workers compute with threads."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from typing_extensions import override


class ThreadsAfterFork(pl.Callback):
    """Limit this process to one thread, and give its forked workers their number of threads.

    OpenMP's threads do not survive a fork, and GNU's implementation does not notice: a worker whose
    parent has ever computed with several threads waits for them forever. Copying weights is enough,
    which the parent does after every fit, so the second job of a multirun would hang. Therefore the
    forking process must never start threads. Create this callback before the model.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # set by the user, or by Lightning in every forked worker to its share of the cores
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", self._threads)))
