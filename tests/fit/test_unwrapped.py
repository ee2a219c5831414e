"""Scripts that expect DDP's wrapper, pickle a Trainer, or use a strategy for several Trainers."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from lightning_commfree import (
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.host import DDPStrategy, pl
from tests.fit import causal_lm
from tests.fit.models import Noisy, Tiny, Voter, dataset, loader, quiet_trainer
from tests.world import run_ranks


class Unwraps(pl.Callback):
    """Unwraps in the usual ways, in a step."""

    def __init__(self) -> None:
        self.models: list[Any] = []

    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any
    ) -> None:
        assert isinstance(trainer.strategy, DDPStrategy)
        model: Any = trainer.model
        assert model.module is trainer.strategy.model.module is pl_module
        while hasattr(model, "module"):
            model = model.module
        assert model is pl_module
        self.models.append(trainer.model)


def check_is_the_module_otherwise(model: Any, module: nn.Module) -> None:
    assert isinstance(model, type(module))
    assert model.state_dict().keys() == module.state_dict().keys()
    assert vars(model) is vars(module)
    model.added = nn.Linear(1, 1)
    assert module.added is model.added
    del model.added
    assert not hasattr(module, "added")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is type(module)
        assert copied.state_dict().keys() == module.state_dict().keys()
    x = torch.ones(2, 3)
    with model.no_sync():  # as scripts that accumulate gradients by hand do under DDP
        assert torch.equal(model(x), module(x))
    assert torch.equal(torch.compile(model, backend="eager")(x), module(x))


def check_trainer_pickles(trainer: pl.Trainer) -> None:
    """Process groups and closures of a fit could not be pickled."""
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    loaded: Any = torch.load(file, weights_only=False)
    assert loaded.strategy.figures() == cast(Any, trainer.strategy).figures()


def unwrap(rank: int, size: int) -> None:
    del rank
    diloco: Any = {"sync_every": 2, "num_fragments": 1, "replica_size": size}
    for strategy, module, data in (
        (StreamingDiLoCoStrategy(sync_every=2, num_fragments=1), Tiny(), loader(8)),
        (DistributedLionStrategy(), Voter(), loader(8)),
        (DominoTPStrategy(size, "batch"), causal_lm.CausalLM(), causal_lm.loader(8, 2)),
        (StreamingDiLoCoStrategy(**diloco, inside="fsdp"), Tiny(), loader(8)),
        (StreamingDiLoCoStrategy(**diloco, inside="ddp"), Tiny(), loader(8)),
    ):
        unwraps = Unwraps()
        trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=2, callbacks=[unwraps])
        trainer.fit(module, data)
        assert trainer.model is module, "as after a fit with `ddp`"
        models, unwraps.models = unwraps.models, []  # a DDP wrapper cannot be pickled
        assert len(models) == 2
        if not hasattr(module, "unshard"):  # FSDP2 makes a class that pickle does not find
            check_trainer_pickles(trainer)
        if type(module) is Tiny and strategy.inside.size == 1:
            check_is_the_module_otherwise(models[0], module)


def test_a_script_may_unwrap_the_model_or_pickle_the_trainer_as_under_ddp(tmp_path: Path) -> None:
    run_ranks(unwrap, 2, tmp_path)


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
