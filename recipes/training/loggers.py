"""What a logger needs beyond Lightning."""

from __future__ import annotations

import lightning.pytorch as pl
import wandb
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override


class FinishWandb(pl.Callback):
    """Ends the W&B run inside the process that opened it.

    W&B does so by itself when an interpreter exits, but a forked worker leaves without that, and
    every row that it logged would be lost.
    """

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and any(isinstance(x, WandbLogger) for x in trainer.loggers):
            wandb.finish()
