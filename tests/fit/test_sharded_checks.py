"""What the ranks of a replica check of a model that they share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_commfree import DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.layouts.fsdp import why_unavailable
from tests.fit.causal_lm import LENGTH, WORDS, CausalLM, loader
from tests.fit.models import quiet_trainer
from tests.world import run_ranks


class OneKeyHead(CausalLM):
    """Both ranks hold the only key head, as a shard of each rank's own heads."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=2 * LENGTH,
        )
        self.wrapped["lm"] = LlamaForCausalLM(config)


class Disturb(pl.Callback):
    """Changes a weight on one rank only."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            weight = pl_module.wrapped["lm"].model.layers[0].self_attn.k_proj.weight
            with torch.no_grad():
                weight.add_(1e-3)


class Meta(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped["lm"] = self.wrapped["lm"].to("meta")


def error_of(run: Any) -> str:
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def play(rank: int, size: int) -> list[str]:
    def fit(*callbacks: pl.Callback) -> None:
        strategy = DominoTPStrategy(check_drift_every=1, split="none")
        trainer = quiet_trainer(
            strategy=strategy, devices=size, max_steps=4, callbacks=[*callbacks]
        )
        trainer.fit(OneKeyHead(), loader(8, 2))

    def validate() -> None:
        strategy = StreamingDiLoCoStrategy(replica_size=2, inside="fsdp")
        quiet_trainer(strategy=strategy, devices=size).validate(Meta(), loader(8, 2))

    return [error_of(fit), error_of(lambda: fit(Disturb())), error_of(validate)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return run_ranks(play, 2, tmp_path_factory.mktemp("checks"))


def test_a_key_head_that_all_ranks_hold_must_stay_equal(ranks: list[list[str]]) -> None:
    for alike, disturbed, _ in ranks:
        assert not alike
        assert disturbed.startswith("AgreedError: Weights that must be equal on ranks 0, 1 differ")
        assert "k_proj" in disturbed


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_model_without_values_cannot_be_validated(ranks: list[list[str]]) -> None:
    for *_, said in ranks:
        assert "are on the meta device and have no values" in said
        assert "call `fit` first" in said
