"""Settings and models that are refused, and the error messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_commfree.domino import FAMILIES, DominoSettings, ParallelModel
from tests.domino.models import make


def divided(model: nn.Module, ranks: int) -> ParallelModel:
    """Shard a model as rank 0 of a group; that sends nothing."""
    channel: Any = SimpleNamespace(size=ranks, rank=0)
    return ParallelModel(model, channel, DominoSettings())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"split": "rows"},
            ValueError,
            r"`split='rows'` is not valid\. Choose one of 'auto', 'batch',.",
        ),
        ({"num_micro_batches": 1}, ValueError, r"`num_micro_batches=1` must be at least 2\."),
        ({"tensor_parallel_size": 0}, ValueError, r"`tensor_parallel_size=0` must be at least 1\."),
        (
            {"num_micro_batches": 2.0},
            TypeError,
            r"`num_micro_batches=2\.0` must be an integer, but it is a float\. Pass an int\.",
        ),
        ({"tensor_parallel_size": True}, TypeError, "must be an integer, but it is a bool"),
    ],
)
def test_settings_out_of_range(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DominoSettings(**given)


@pytest.mark.parametrize(
    ("kind", "sizes", "ranks", "text"),
    [
        (
            "gpt2",
            {},
            3,
            "GPT2LMHeadModel has 4 attention heads, which cannot be split evenly across 3"
            r" tensor-parallel ranks\. Choose a `tensor_parallel_size` that divides 4\.",
        ),
        (  # some ranks would hold one and a half
            "llama",
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            "LlamaForCausalLM has 4 key-value heads, which can be neither split evenly across 6"
            r" tensor-parallel ranks nor replicated so that each rank holds one\. Choose a"
            r" `tensor_parallel_size` that divides 4 or is a",
        ),
        (
            "gpt2",
            {"n_inner": 26},
            4,
            r"GPT2\w+ has MLPs of width 26 \(`n_inner`\), which",
        ),
        (
            "llama",
            {"intermediate_size": 26},
            4,
            r"Ll\w+ has MLPs of width 26 \(`intermediate_size`\), which cannot be split evenly"
            r" across 4 tensor-parallel ranks\. Choose a `tensor_parallel_size` that divides 26\.",
        ),
        (
            "olmo",
            {},
            4,
            "OlmoForCausalLM has 2 key-value heads, which its plan cannot split evenly across 4"
            r" tensor-parallel ranks\. Choose a `tensor_parallel_size` that divides 2\.",
        ),
        (
            "glm4",
            {"intermediate_size": 25},
            2,
            "has a width of 25 at 'layers.0.mlp.down_proj'",
        ),
        (
            "mixtral",
            {"intermediate_size": 25},
            2,
            "has a width of 25 at 'layers.0.mlp.experts', which cannot be split evenly across 2"
            " tensor-parallel",
        ),
    ],
)
def test_sizes_that_do_not_divide(kind: str, sizes: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        divided(make(kind, **sizes), ranks)


def test_a_model_without_a_plan() -> None:
    """The error names the class and everything that is supported."""
    small = {"ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"vocab_size": 9, "hidden_size": 8, "word_embed_proj_dim": 8}
    model = OPTForCausalLM(OPTConfig(**sizes, **small, max_position_embeddings=8))
    text = "Tensor parallelism is not supported for `OPTForCausalLM`: its config has no"
    with pytest.raises(ValueError, match=text) as refusal:
        divided(model, 2)
    assert all(name in str(refusal.value) for name in (*FAMILIES, "base_model_tp_plan"))


def test_a_plan_with_a_style_that_is_not_supported() -> None:
    model = make("phi3")
    model.config.base_model_tp_plan = {"layers.*.mlp.down_proj": "sequence_parallel"}
    text = (
        r"The tensor-parallel plan of `Phi3ForCausalLM` assigns the unsupported style"
        r" 'sequence_parallel' to 'layers\.0\.mlp\.down_proj', a `Linear`\. Supported styles:"
        r" 'colwise', .* for linear layers, and 'moe_tp_experts' for experts with `gate_up_proj`"
        r" and `down_proj`\."
    )
    with pytest.raises(ValueError, match=text):
        divided(model, 2)


def test_heads_that_a_plan_shards_must_divide_evenly() -> None:
    """Nine on two ranks; they need not if the plan gathers them first."""
    nine = {"num_attention_heads": 9, "num_key_value_heads": 9, "hidden_size": 36}
    with pytest.raises(ValueError, match="OlmoForCausalLM has 9 attention heads, which cannot"):
        divided(make("olmo", **nine), 2)
    divided(make("olmo2", **nine), 2)


def test_a_plan_for_single_parameters_is_not_supported() -> None:
    """They belong to experts; otherwise they would stay full on every rank and be summed."""
    model = make("olmo")
    model.config.base_model_tp_plan = {"layers.*.mlp.gate_proj.weight": "colwise"}
    with pytest.raises(
        ValueError, match=r"'colwise' to 'layers\.0\.mlp\.gate_proj\.weight', a `Parameter`\."
    ):
        divided(model, 2)


@pytest.mark.parametrize("kind", ["olmo", "gpt2", "llama"])
def test_a_refused_model_is_untouched(kind: str) -> None:
    """The refused layer is the last one, and the layers before it are not sharded either."""
    model, plain = make(kind), make(kind)
    if kind == "olmo":
        plan = {**model.config.base_model_tp_plan, "layers.1.mlp.up_proj": "packed"}
        plan.pop("layers.*.mlp.up_proj")
        model.config.base_model_tp_plan = plan
    elif kind == "gpt2":
        model.transformer.h[1].mlp.c_fc = Conv1D(25, 16)
    else:
        model.model.layers[1].mlp.gate_proj = nn.Linear(16, 25)
    before = [(name, type(module)) for name, module in model.named_modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="'packed'|of width 25"):
        divided(model, 2)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    if kind == "olmo":  # the others' layers do not fit each other
        words = torch.tensor([[1, 2, 3]])
        assert torch.equal(model(words).logits, plain(words).logits)


def test_bidirectional_attention_is_sharded_and_not_scheduled() -> None:
    parallel = divided(make("gemma3", use_bidirectional_attention=True), 2)
    assert not parallel.scheduled
    assert parallel.sharding.specs


@pytest.mark.parametrize(
    "kind",
    ["gpt2", "llama one key head", "mistral", "qwen2 sliding", "gemma3"],
)
def test_supported_models_are_scheduled_and_keep_their_names(kind: str) -> None:
    model, plain = make(kind), make(kind)
    parallel = divided(model, 4)
    assert len(parallel.sharding.sublayers) == 4
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    held = sum(p.numel() for p in model.parameters())
    whole = sum(p.numel() for p in plain.parameters())
    assert held < 0.4 * whole  # a quarter, plus norms, key heads and positions in full
