"""The last-round benchmark: its simulation equals real processes, and a true run of the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch import Tensor

from benchmarks.common.pretraining import batches
from benchmarks.last_round import __main__ as last_round
from benchmarks.last_round import runs
from benchmarks.last_round.simulated import SimulatedDiLoCo, take_steps, train
from benchmarks.quality.grid import Run, Size
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import FixedMembership
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from recipes.training.pretraining import build_data, build_module
from tests.world import run_ranks

STEPS = 9
BLOCKS = 12  # per step: equal shares for 2 and 3 replicas
SMALL = [
    "data=synthetic",
    "data.corpus.train_characters=6000",
    "data.corpus.validation_characters=1000",
    "optimizer.warmup_steps=2",
    "data.block_size=16",
    "model.n_embd=16",
    "model.n_layer=1",
    f"data.batch_size={BLOCKS}",
    f"trainer.max_steps={STEPS}",
    "strategy.sync_every=4",  # fragment 0 leaves after 4 and 8, fragment 1 after 6
]
Weights = list[Tensor]


def weights_of(module: torch.nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in module.parameters()]


def settings_of(config: dict[str, Any]) -> DiLoCoSettings:
    settings = instantiate(config["strategy"], _convert_="all").settings
    assert isinstance(settings, DiLoCoSettings)
    return settings


def simulated(config: dict[str, Any], replicas: int) -> tuple[list[Weights], dict[str, Weights]]:
    """Return each replica's local weights after the last step, and the weights by last round."""
    pl.seed_everything(config["seed"], verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    modules = [module, *(deepcopy(module) for _ in range(replicas - 1))]
    made = [module.configure_optimizers() for module in modules]
    diloco = SimulatedDiLoCo(modules, settings_of(config))
    for batch in batches(data, STEPS):
        take_steps(modules, made, batch, config["trainer"]["gradient_clip_val"])
        diloco.after_steps()
    local = [weights_of(module) for module in modules]
    return local, {name: weights_of(module) for name in diloco.last_rounds()}


def real_rank(rank: int, size: int, config: dict[str, Any]) -> dict[str, Weights]:
    """Train as one of several processes; return the local weights, and those after the fit."""
    pl.seed_everything(config["seed"], verbose=False)
    blocks = config["data"]["batch_size"] // size
    data = build_data({**config, "data": {**config["data"], "batch_size": blocks}})
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": size, "rank": rank})
    module = build_module(config, data)
    made = module.configure_optimizers()
    settings = settings_of(config)
    fragments = split_into_fragments(module, None, settings.fragment_pattern)
    channel = Channel(range(size), rank, Ledger(), dist.group.WORLD)
    diloco = StreamingDiLoCo(module, fragments, settings, FixedMembership(channel))
    for batch in batches(data, STEPS):
        take_steps([module], [made], batch, config["trainer"]["gradient_clip_val"])
        diloco.after_step()
    local = weights_of(module)
    diloco.finish()
    diloco.close()
    return {"local": local, "mean": weights_of(module)}


def assert_bit_equal(ours: Weights, theirs: Weights) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("wire", "replicas"), [("fp32", 2), ("fp4", 3)])
def test_the_simulation_equals_real_processes_bit_for_bit(
    wire: str, replicas: int, compose_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = compose_config(*SMALL, "tokenizer=bytes", f"strategy.wire_dtype={wire}")
    local, by_round = simulated(config, replicas)
    for rank, theirs in enumerate(run_ranks(real_rank, replicas, tmp_path, config)):
        assert_bit_equal(local[rank], theirs["local"])
        assert_bit_equal(by_round["mean"], theirs["mean"])
    assert not any(map(torch.equal, local[0], local[1]))
    assert not any(map(torch.equal, by_round["outer"], by_round["mean"]))
    exact = [sum(values) / replicas for values in zip(*local, strict=True)]
    torch.testing.assert_close(by_round["mean_fp32"], exact, rtol=1e-5, atol=1e-7)
    if wire == "fp32":
        assert_bit_equal(by_round["mean"], by_round["mean_fp32"])


def test_a_true_run_writes_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = [*SMALL, f"cache_dir={tmp_path}/cache"]
    run = Run("gpt2_tiny", "fp4", 2, 4, 1, 0.01)
    monkeypatch.setattr(last_round, "planned", lambda losses, seeds: [run])
    last_round.main(["--results", str(tmp_path / "l.json"), *more])
    stored = json.loads((tmp_path / "l.json").read_text())["runs"]
    losses = {entry["run"]["last_round"]: entry["validation_loss"] for entry in stored}
    assert losses == train(runs.configuration(run, Size(), more))
    assert len(set(losses.values())) == 3
    assert "not run:" in (tmp_path / "l.md").read_text()


@pytest.mark.parametrize(
    ("found", "wins"),
    [
        ([], "missing"),
        ([0.02], "one seed"),
        ([0.01, 0.02, 0.03], "mean"),
        ([-0.01, -0.02, -0.03], "outer step"),
        ([0.0, 0.0, 0.03], "neither"),
    ],
)
def test_the_winner_is_better_by_more_than_the_standard_deviation(
    found: list[float], wins: str
) -> None:
    assert runs.winner(found) == wins
