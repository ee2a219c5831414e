"""Scripts that expect DDP's wrapper around the module, or use a strategy for several Trainers."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from lightning_commfree.host import DDPStrategy, pl
from tests.strategies.models import Noisy, dataset, quiet_trainer


class Unwraps(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, DDPStrategy)
        assert trainer.model.module is pl_module


def test_a_script_that_unwraps_the_model_is_told_what_to_use() -> None:
    """Also from a forked rank, whose error reaches the launching process as text."""
    trainer = quiet_trainer(
        strategy="streaming_diloco_fork", devices=2, max_steps=1, callbacks=[Unwraps()]
    )
    with (
        pytest.warns(UserWarning, match=r"Use `trainer.lightning_module`, which works with every"),
        pytest.raises(Exception, match="object has no attribute 'module'"),
    ):
        trainer.fit(Noisy(), DataLoader(dataset(8), batch_size=2))
