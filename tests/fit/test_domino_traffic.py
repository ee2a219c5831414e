"""Domino's forecast of the bytes of a training step equals its ledger, tag by tag."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from lightning_commfree import DominoTPStrategy
from lightning_commfree.comm.ledger import END, STEPS, all_gather_bytes
from lightning_commfree.domino.sharded_module import STATE_TAG
from tests.fit.causal_lm import LENGTH, WORDS, CausalLM, words
from tests.fit.models import quiet_trainer
from tests.world import run_ranks

SIZE, ROWS, STEPS_DONE = 4, 2, 3


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


class Planned(CausalLM):
    """Its model is divided by the plan in its config; nothing is scheduled, its loss is whole."""

    def __init__(self, model: type[Any] = GPTNeoXForCausalLM, config: Any = None) -> None:
        super().__init__()
        config = config or GPTNeoXConfig(vocab_size=WORDS, num_attention_heads=4, **SIZES)
        self.wrapped["lm"] = model(config)


def phi3() -> Planned:
    return Planned(Phi3ForCausalLM, Phi3Config(vocab_size=WORDS, **LLAMA))


def mixtral() -> Planned:
    config = MixtralConfig(vocab_size=WORDS, num_local_experts=3, **LLAMA)
    return Planned(MixtralForCausalLM, config)


CLIPPED = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {  # module, tensor parallel size, Trainer
    "gpt2, two groups, clipped": (CausalLM, 2, CLIPPED),
    "llama, key heads shared": (lambda: CausalLM("llama"), 4, {}),
    "llama, bf16-mixed": (lambda: CausalLM("llama"), 2, {"precision": "bf16-mixed"}),
    "one rank a model": (CausalLM, 1, {}),
    "by a plan": (Planned, 2, {}),
    "by a plan, whole activations": (phi3, 2, {}),
    "by a plan, experts": (mixtral, 2, {}),
}


class Foretell(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tokens = trainer.accumulate_grad_batches * ROWS * LENGTH
        self.plan = trainer.strategy.traffic(tokens)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.part_bytes = sum(p.nbytes for p in trainer.strategy.inside.sharded.specs)


def fit(module: Any, group: int, kwargs: dict[str, Any]) -> tuple[dict[str, float], Any, int, int]:
    strategy, foretell = DominoTPStrategy(group), Foretell()
    trainer = quiet_trainer(
        strategy=strategy, devices=SIZE, max_steps=STEPS_DONE, callbacks=[foretell], **kwargs
    )
    trainer.fit(module(), DataLoader(words(16 * SIZE), batch_size=ROWS))
    sent = strategy.ledger.bytes_by_phase[STEPS]
    once = {tag for tag in sent if tag == "handshake"}  # that a group's first batches are the same
    foretold = {tag: STEPS_DONE * num for tag, num in foretell.plan.bytes_by_tag.items()}
    at_end = strategy.ledger.bytes_by_phase[END][STATE_TAG]
    whole = all_gather_bytes(foretell.part_bytes, group)
    return foretold, {t: num for t, num in sent.items() if num and t not in once}, at_end, whole


def play(rank: int, size: int) -> dict[str, Any]:
    return {case: fit(*arguments) for case, arguments in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(play, SIZE, tmp_path_factory.mktemp("traffic"))


@pytest.mark.parametrize("case", CASES)
def test_forecast_equals_ledger(ranks: list[dict[str, Any]], case: str) -> None:
    for found in ranks:
        foretold, sent, at_end, whole = found[case]
        assert foretold == sent
        assert at_end == whole, "the end of a fit without a checkpoint gathers the model alone"
    tags = set(ranks[0][case][0])
    assert "flags" in tags
    assert ("tensor_norm" in tags) == ("clipped" in case)
    assert ("tensor_shared" in tags) == ("shared" in case)
    assert ("data_gradient" in tags) == (CASES[case][1] < SIZE)
    assert ("tensor_loss" in tags) == (not case.startswith(("one rank a model", "by a plan")))
