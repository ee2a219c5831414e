"""Scripts that expect DDP's wrapper around the module, or use a strategy for several Trainers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from lightning_commfree import StreamingDiLoCoStrategy
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


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_an_instance_for_a_second_trainer_is_refused(accelerator: str) -> None:
    """Lightning refuses its own too, and speaks of accelerators."""
    strategy = StreamingDiLoCoStrategy()
    first = quiet_trainer(strategy=strategy, devices=2, accelerator=accelerator)
    with pytest.raises(RuntimeError, match="`StreamingDiLoCoStrategy` was already passed to anoth"):
        quiet_trainer(strategy=strategy, devices=1, accelerator=accelerator)
    assert first.world_size == 2
    assert isinstance(strategy.accelerator, pl.accelerators.CPUAccelerator)


def test_a_name_and_a_copied_trainer_serve_several_fits() -> None:
    """As libraries use them: by name for every Trainer, or a copy of one Trainer for every fit."""
    data = DataLoader(dataset(8), batch_size=2)
    settings = {"strategy": "streaming_diloco_fork", "devices": 2, "max_steps": 1}
    module, trainer = Noisy(), quiet_trainer(**settings)
    weights = [parameters_to_vector(module.parameters())]
    for _ in range(2):
        copy.deepcopy(trainer).fit(module, data)
        weights.append(parameters_to_vector(module.parameters()))
        assert not torch.equal(weights[-1], weights[-2])
    quiet_trainer(**settings).validate(module, data)
