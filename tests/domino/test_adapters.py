"""LoRA beside sharded linears: losses and gradients equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.domino import DominoSettings, ParallelModel
from tests.domino.models import Case, all_of_it_in, batch_for, exact_loss, make_for
from tests.domino.ranks import whole_gradients, with_channel
from tests.world import run_ranks

peft = pytest.importorskip("peft")

CASES = [
    Case(kind, rows, split, checkpoint=checkpoint, padding=padding)
    for kind, rows, split, checkpoint, padding in (
        ("gpt2", 3, "batch", False, "right"),
        ("gpt2", 2, "token", True, "none"),
        ("llama", 3, "batch", True, "left"),
        ("llama one key head", 2, "none", False, "none"),
        ("qwen3", 2, "token", False, "right"),
    )
]
EXACT = 1e-12


def adapted(case: Case, **changes: Any) -> Any:
    settings = {"r": 3, "target_modules": "all-linear", "lora_dropout": 0.0, **changes}
    model = peft.get_peft_model(make_for(case), peft.LoraConfig(**settings))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # B starts as zeros, which would hide a mistake
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def loss_of(model: Any, case: Case, **more: Any) -> Tensor:
    batch = batch_for(case)
    labels = batch.pop("labels")
    with all_of_it_in(model.base_model.model, case.dtype):
        loss = exact_loss(model(**batch, **more).logits, labels, model.config.vocab_size)
        loss.backward()
    return loss.detach()


# the second has no schedule: hidden states of single blocks are requested
WAYS: tuple[dict[str, Any], ...] = ({}, {"output_hidden_states": True})


def play(channel: Any) -> list[Any]:
    found = []
    for case in CASES:
        for way in WAYS:
            model = adapted(case)
            inner = model.base_model.model
            parallel = ParallelModel(inner, channel, DominoSettings(None, case.split, case.parts))
            loss = loss_of(model, case, **way)
            gradients = whole_gradients(parallel)
            held = sum(p.numel() for p in inner.parameters())
            found.append((loss, gradients, held))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("lora"), play)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_equals_one_process(ranks: list[list[Any]], number: int) -> None:
    case = CASES[number]
    model = adapted(case)
    expected = loss_of(model, case)
    for rank in ranks:
        for loss, gradients, held in rank[2 * number : 2 * number + 2]:
            torch.testing.assert_close(loss, expected, rtol=0, atol=EXACT)
            trained = 0
            for name, parameter in model.base_model.model.named_parameters():
                assert (gradients[name] is None) == (parameter.grad is None), name
                if parameter.grad is not None:
                    trained += 1
                    torch.testing.assert_close(
                        gradients[name], parameter.grad, rtol=0, atol=EXACT, msg=name
                    )
            assert trained >= 2 * 2 * 4, "A and B, beside four linears or more of both blocks"
            assert held < 0.75 * sum(p.numel() for p in model.parameters())


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [  # kind, split, changes, text
    ("llama", "batch", {"lora_dropout": 0.1}, "its dropout mask would differ between ranks"),
    ("llama", "batch", {"use_dora": True}, "DoRA and other LoRA variants need full weights"),
    (
        "llama",
        "batch",
        {"lora_bias": True, "target_modules": ["o_proj"]},
        "would add `lora_bias` to",
    ),
    ("llama", "batch", {"target_modules": ["lm_head"]}, "it is around the embedding or the head"),
    ("llama", "batch", {"target_modules": ["embed_tokens"]}, "it is not LoRA of a plain linear"),
    ("olmo", "batch", {}, "`OlmoForCausalLM` has adapters, which the tensor-parallel plan"),
    ("llama", "weight", {}, "`split='weight'` does not support a model with LoRA"),
]


def refused(channel: Any) -> list[str]:
    texts = []
    for kind, split, changes, _ in REFUSED:
        model = adapted(Case(kind), **changes)
        before = [name for name, _ in model.named_parameters()]
        with pytest.raises(ValueError, match="adapter") as refusal:
            ParallelModel(model.base_model.model, channel, DominoSettings(split=split))
        assert [name for name, _ in model.named_parameters()] == before
        texts.append(str(refusal.value))
    return texts


def test_unsupported_adapters_are_refused(tmp_path: Path) -> None:
    (texts,) = run_ranks(with_channel, 1, tmp_path, refused)
    for said, (*_, expected) in zip(texts, REFUSED, strict=True):
        assert expected in said
