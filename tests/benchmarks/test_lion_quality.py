"""The quality benchmark of Distributed Lion: its simulation equals real processes; the grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.pretraining import batches
from benchmarks.lion_quality.grid import BETAS
from benchmarks.lion_quality.simulated import simulated_lion_cosine, take_step, train
from lightning_commfree import DistributedLion
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion import LionSettings
from recipes.training.evaluation import token_loss
from recipes.training.optimizer import lion_betas
from recipes.training.pretraining import build_data, build_module
from tests.world import run_ranks

STEPS = 6
BLOCKS = 12  # per step: equal shares for 2, 3 and 4 workers
SMALL = [
    "data=synthetic",
    "data.corpus.train_characters=6000",
    "data.corpus.validation_characters=1000",
    "optimizer.warmup_steps=2",
    "trainer.gradient_clip_val=0.3",
    "data.block_size=16",
    f"data.batch_size={BLOCKS}",
    "model.n_embd=16",
    "model.n_layer=1",
    f"trainer.max_steps={STEPS}",
]
LION = [*SMALL, "tokenizer=bytes", "optimizer=distributed_lion"]
Weights = list[Tensor]


def weights_of(module: torch.nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_bit_equal(ours: Weights, theirs: Weights) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def real_rank(
    rank: int, size: int, config: dict[str, Any], vote: str
) -> tuple[Weights, Weights, dict[str, float]]:
    """Train as one of several processes; return weights, momenta and statistics of the vote."""
    pl.seed_everything(config["seed"], verbose=False)
    blocks = config["data"]["batch_size"] // size
    data = build_data({**config, "data": {**config["data"], "batch_size": blocks}})
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": size, "rank": rank})
    module = build_module(config, data)
    made = module.configure_optimizers()
    optimizer = made["optimizer"]
    assert type(optimizer) is DistributedLion
    channel = Channel(range(size), rank, Ledger(), dist.group.WORLD)
    voting = optimizer.join(
        list(module.named_parameters()), View.of(channel), LionSettings(vote=vote)
    )
    for batch in batches(data, STEPS):
        take_step(module, made, batch, workers=1)
    momenta = [optimizer.state[p]["momentum"] for p in module.parameters()]
    shares = voting.shares()
    optimizer.leave()
    return weights_of(module), momenta, shares


@pytest.mark.parametrize(("workers", "vote"), [(2, "majority"), (3, "average")])
def test_the_simulation_equals_real_processes_bit_for_bit(
    workers: int, vote: str, compose_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = compose_config(*LION)
    pl.seed_everything(config["seed"], verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    start = weights_of(module)
    made = simulated_lion_cosine(module, config["optimizer"], workers, vote)
    for batch in batches(data, STEPS):
        take_step(module, made, batch, workers)
    optimizer = made["optimizer"]
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for rank, (weights, momenta, shares) in enumerate(
        run_ranks(real_rank, workers, tmp_path, config, vote)
    ):
        assert_bit_equal(weights_of(module), weights)
        by_parameter = dict(zip(module.parameters(), momenta, strict=True))
        theirs = torch.cat([by_parameter[p].flatten() for p in order])
        assert torch.equal(torch.cat([m_WN[rank] for m_WN in optimizer.momenta_WN]), theirs)
        assert 0 < shares["agreement"] < 1
        assert (shares["ties"] > 0.05) == (workers == 2)
    assert not any(map(torch.equal, weights_of(module), start))


def test_one_worker_trains_like_a_trainer(
    compose_config: Callable[..., dict[str, Any]], quiet_trainer: Callable[..., pl.Trainer]
) -> None:
    config = compose_config(*LION)
    pl.seed_everything(config["seed"], verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    clips = {"gradient_clip_val": 0.3, "limit_val_batches": 0}
    quiet_trainer(max_steps=STEPS, **clips).fit(module, datamodule=data)
    data.trainer = None
    expected = token_loss(module, data.val_dataloader())
    assert train(config, 1, None) == train(config, 1, "majority") == expected
    assert train(config, 2, "majority") != expected
    unclipped = compose_config(*LION, "trainer.gradient_clip_val=null")
    assert train(unclipped, 1, None) != expected


def test_the_recipe_uses_betas_of_the_benchmark() -> None:
    assert lion_betas(500) in BETAS
