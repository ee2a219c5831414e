"""Small transformers models, batches for them, and reference results of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORDS = 37  # odd: no number of ranks divides it
WIDTH, LAYERS, HEADS, TOKENS, PLACES = 16, 2, 4, 9, 24
LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": PLACES,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": PLACES,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GEMMA3 = {
    **LLAMA,
    "head_dim": 4,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "gpt2 untied": (GPT2LMHeadModel, GPT2Config, {**GPT2, "tie_word_embeddings": False}),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        {**LLAMA, "attention_bias": True, "mlp_bias": True},
    ),
    "llama tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "llama one key head": (LlamaForCausalLM, LlamaConfig, {**LLAMA, "num_key_value_heads": 1}),
    # the embedding of its padding word gets no gradient
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {**LLAMA, "sliding_window": 4, "pad_token_id": 0},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, LLAMA),
    "qwen2 sliding": (Qwen2ForCausalLM, Qwen2Config, {**LLAMA, **SLIDING}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**LLAMA, "head_dim": 4}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {**LLAMA, "head_dim": 8}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**LLAMA, "head_dim": 4, "sliding_window": 4},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
    "olmo": (OlmoForCausalLM, OlmoConfig, LLAMA),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {**LLAMA, "num_key_value_heads": 1}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {**LLAMA, "pad_token_id": 0}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {**LLAMA, "head_dim": 4, "pad_token_id": 0}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**LLAMA, "num_local_experts": 3}),
    "qwen3 moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**LLAMA, **MOE, "head_dim": 4, "mlp_only_layers": [1]},
    ),
}


@dataclass(frozen=True)
class Case:
    """One model, one batch, and the way to run them.

    Attributes:
        padding: "none" | "left" | "right", of the first row.
        positions: "implied" | "stretched", in every other row | "packed", two texts in each row.
        loss: "own", the model's | "gathered", from logits of the whole vocabulary.
        frozen: "nothing" | "embeddings" | "layers" (the first one).
        embeds: the batch comes as embeddings, which want a gradient.
    """

    kind: str = "gpt2"
    rows: int = 2
    split: str = "batch"
    parts: int = 2
    checkpoint: bool = False
    padding: str = "none"
    positions: str = "implied"
    attention: str = "sdpa"
    loss: str = "own"
    frozen: str = "nothing"
    embeds: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __str__(self) -> str:
        flags = [name for name in ("checkpoint", "embeds") if getattr(self, name)]
        words = (self.kind, self.rows, self.split, self.parts, self.padding, self.positions)
        rest = (self.attention, self.loss, self.frozen, *flags)
        return " ".join(str(word).replace(" ", "_") for word in (*words, *rest))


@dataclass
class Outcome:
    """Results of a step as full tensors."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    logits: Tensor | None = None
    embeds: Tensor | None = None  # the gradient of the batch's embeddings


def make(
    kind: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attention: str = "sdpa",
    **more: Any,
) -> Any:
    """Return a model in training mode; equal arguments give equal weights."""
    model_class, config_class, settings = KINDS[kind]
    config = config_class(**{**settings, **more})
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # grouped products know no float64
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).train()


def make_for(case: Case, **more: Any) -> Any:
    """Return the case's model, frozen and checkpointed as it says."""
    model = make(case.kind, case.dtype, case.seed, case.attention, **more)
    if case.frozen == "embeddings":
        model.get_input_embeddings().weight.requires_grad_(False)
    if case.frozen == "layers":
        base = getattr(model, model.base_model_prefix)
        (base.h if hasattr(base, "h") else base.layers)[0].requires_grad_(False)
    if case.checkpoint:  # the newer name, where transformers has it
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return model


def batch_for(case: Case) -> dict[str, Any]:
    """Return the arguments of the model's forward, labels included."""
    source = torch.Generator().manual_seed(100 * case.seed + case.rows)
    words = torch.randint(0, WORDS, (case.rows, TOKENS), generator=source)
    labels = words.clone()
    batch: dict[str, Any] = {"input_ids": words, "labels": labels}
    if case.padding != "none":
        mask = torch.ones_like(words)
        where = slice(None, 3) if case.padding == "left" else slice(-3, None)
        mask[0, where] = 0
        # after left padding the first word is predicted from a padding word, which sees nothing
        labels[0, slice(None, 4) if case.padding == "left" else where] = -100
        batch["attention_mask"] = mask
    row, place = torch.arange(case.rows).unsqueeze(1), torch.arange(TOKENS).unsqueeze(0)
    if case.positions == "stretched":  # a mere shift would be nothing to rotary embeddings
        batch["position_ids"] = place * (1 + row % 2) + row
        # or transformers would take every jump for the beginning of another text
        batch.setdefault("attention_mask", torch.ones_like(words))
    if case.positions == "packed":  # two texts in a row, each row's second one of another length
        batch["position_ids"] = torch.where(place > row, place - row - 1, place)
        batch["use_cache"] = False  # with a cache transformers does not look for packed texts
    if case.embeds:
        embeds = torch.randn(case.rows, TOKENS, WIDTH, generator=source, dtype=torch.float64)
        batch["inputs_embeds"] = embeds.to(case.dtype).requires_grad_()
        del batch["input_ids"]
    return batch


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return the causal cross entropy in the dtype of the logits; transformers' is in float32."""
    flat = logits[:, :-1].reshape(-1, vocab_size)
    return cross_entropy(flat, labels[:, 1:].reshape(-1))


class _Torch:
    """torch for a model's code, which asks for float32 by name in its norms and softmax."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def all_of_it_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Keep a float64 model in float64 throughout the body.

    There a sum in another order, off by 1e-16, is now and then rounded to the next float32. And the
    mask of eager attention, float64's least number, is -inf in a float32 softmax: NaN for a padding
    word that sees nothing.
    """
    code: Any = sys.modules[type(model).__module__]
    as_float = Tensor.float
    if dtype == torch.float64:
        code.torch = _Torch()
        Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        code.torch = torch
        Tensor.float = as_float  # type: ignore[method-assign]


def step(model: Any, case: Case, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Run forward and backward; return loss and, for a gathered loss, logits.

    Logits of padding words are 0: nothing depends on their attention.
    """
    logits = None
    with all_of_it_in(model, case.dtype):
        if case.loss == "own":
            loss = model(**batch).loss
        else:
            labels = batch["labels"]
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
            loss = exact_loss(logits, labels, WORDS)
        loss.backward()
    if logits is not None:
        mask = batch.get("attention_mask", torch.ones(logits.shape[:2]))
        logits = logits.detach() * mask.unsqueeze(-1)
    return loss.detach(), logits


@cache
def reference(case: Case) -> Outcome:
    """Return the results of one process on the full batch, in the case's dtype."""
    model = make_for(case)
    model.loss_function = exact_loss
    batch = batch_for(case)
    loss, logits = step(model, case, batch)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    embeds = batch["inputs_embeds"].grad if case.embeds else None
    return Outcome(loss, gradients, logits, embeds)


def worst_error(outcome: Outcome, expected: Outcome) -> float:
    """Return the largest difference of any element, relative to the largest of its tensor."""
    pairs = [(outcome.loss, expected.loss), (outcome.logits, expected.logits)]
    pairs.append((outcome.embeds, expected.embeds))
    assert outcome.gradients.keys() == expected.gradients.keys()
    pairs += [(outcome.gradients[name], whole) for name, whole in expected.gradients.items()]
    worst = 0.0
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert ours.shape == theirs.shape
        assert theirs.isfinite().all(), "the reference is no number"
        error = (ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=1e-3)
        worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers in the body, and restore them."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
