"""The model architectures that Domino schedules.

=====================  ========================================================================
class in transformers  differences from Llama
=====================  ========================================================================
`GPT2LMHeadModel`      learned position embeddings, `Conv1D` linears of shape (in, out) with
                       packed query, key and value, dropout after both sums; it has its own
                       class, `GPT2`
`LlamaForCausalLM`     none: rotary embeddings, RMS norms, SwiGLU, grouped-query attention
`MistralForCausalLM`   none: the mask from transformers contains the sliding window
`Qwen2ForCausalLM`     biases of query, key and value, sharded with their weights
`Qwen3ForCausalLM`     per-head norms of queries and keys
`GemmaForCausalLM`     a scaled embedding
`Gemma2ForCausalLM`    like Gemma, plus a norm after each sum and sliding windows in some blocks
`Gemma3ForCausalLM`    like Gemma 2, plus Qwen 3's norms
=====================  ========================================================================

To add an architecture, add a line to `FAMILIES`, and a subclass of `Family` if its modules are not
Llama's. Models are recognized by class name, because the library does not import transformers.
Phi and GPT-NeoX add the outputs of attention and MLP to the residual stream in one sum, so they
would need a `Sublayer` with two row-parallel layers instead of one. They are sharded by the plan in
their config instead (`plan`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from lightning_commfree.domino.sharding import (
    Sharding,
    ShardSpec,
    base_of,
    check_heads,
    check_width,
    column,
    dropout,
    row,
    vocabulary,
)
from lightning_commfree.domino.sublayers import Sublayer, attention_body, mlp_body


@dataclass(frozen=True)
class Family(ABC):
    """A causal language model architecture whose blocks all consist of attention and an MLP.

    Attributes:
        base: attribute name of the model without its head.
        blocks_name: attribute name of the list of blocks in the base.
        embedding_name: attribute name of the word embedding in the base.
        raw_embedding: whether the embedding's output enters the first block unchanged. Its
            all-reduce can then overlap with that block.
    """

    base: ClassVar[str]
    blocks_name: ClassVar[str]
    embedding_name: ClassVar[str]
    raw_embedding: bool = False

    @abstractmethod
    def check_divisible(self, model: Any, num_ranks: int) -> None:
        """Raise a `ValueError` if heads or MLP widths cannot be divided among the ranks."""

    @abstractmethod
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        """Shard one block in place."""

    @abstractmethod
    def sublayers(self, block_name: str, block: Any) -> Sequence[Sublayer]:
        """Return a sharded block's attention and MLP sublayers; traces show `block_name`."""

    def can_be_scheduled(self, model: Any) -> bool:
        """Return whether a schedule can run the blocks; they must consist only of sublayers."""
        del model
        return True

    def returns_tensor(self, block: nn.Module) -> bool:
        """Return whether a block returns a tensor; old versions of transformers return a tuple."""
        returned = inspect.signature(type(block).forward).return_annotation
        return "tuple" not in str(returned).lower()

    def blocks_in(self, model: Any) -> tuple[nn.Module, str]:
        """Return the module that contains the list of blocks, and the list's attribute name."""
        return getattr(model, self.base), self.blocks_name

    def blocks(self, model: Any) -> Any:
        """Return the list of blocks."""
        return getattr(*self.blocks_in(model))

    def vocabulary(self, model: Any) -> tuple[nn.Module, nn.Module]:
        """Return the word embedding and the language model head."""
        return getattr(getattr(model, self.base), self.embedding_name), model.lm_head

    def shard(self, sharding: Sharding) -> None:
        """Shard a model in place, block by block; if it can be scheduled, record its sublayers."""
        model: Any = sharding.model
        base, blocks = getattr(model, self.base), self.blocks(model)
        for block in blocks:
            # one block at a time: a model on `meta` may be too large for one rank
            sharding.materializer.materialize(block)
            self.shard_block(sharding, block)
        vocabulary(sharding, (base, self.embedding_name), (model, "lm_head"))

        if self.can_be_scheduled(model):
            sharding.blocks = list(blocks)
            sharding.sublayers = [
                sublayer
                for i, block in enumerate(blocks)
                for sublayer in self.sublayers(f"layer {i}", block)
            ]
            sharding.raw_embedding = self.raw_embedding


@dataclass(frozen=True)
class Llama(Family):
    """Llama and architectures with the same module names.

    Attributes:
        head_norms: whether attention normalizes queries and keys, with the same weight for all
            heads.
        post_norms: whether each all-reduced sum is followed by a second norm.
    """

    base, blocks_name, embedding_name = "model", "layers", "embed_tokens"
    head_norms: bool = False
    post_norms: bool = False

    @override
    def check_divisible(self, model: Any, num_ranks: int) -> None:
        heads, key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        check_heads(type(model).__name__, heads, key_heads, num_ranks)
        for block in self.blocks(model):
            width = block.mlp.gate_proj.weight.shape[0]
            check_width(model, "intermediate_size", width, num_ranks)

    @override
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        attention, mlp, ranks = block.self_attn, block.mlp, sharding.group.size
        heads = attention.config.num_attention_heads
        key_heads, head_dim = attention.config.num_key_value_heads, attention.head_dim

        column(sharding, attention, "q_proj", ShardSpec.even(0, heads * head_dim, ranks))
        spec = _key_spec(heads, key_heads, head_dim, ranks)
        for name in ("k_proj", "v_proj"):
            column(sharding, attention, name, spec)
        row(sharding, attention, "o_proj")
        if self.head_norms:  # a rank's gradient covers only its own heads
            sharding.mark_partial_gradients(attention.q_norm)
            sharding.mark_partial_gradients(attention.k_norm)
        # query heads per key head on this rank, which has at least one key head
        groups = (heads // ranks) // max(key_heads // ranks, 1)
        sharding.set(attention, "num_key_value_groups", groups)

        spec = ShardSpec.even(0, mlp.gate_proj.weight.shape[0], ranks)
        for name in ("gate_proj", "up_proj"):
            column(sharding, mlp, name, spec)
        row(sharding, mlp, "down_proj")

    @override
    def sublayers(self, block_name: str, block: Any) -> Sequence[Sublayer]:
        attention, mlp = block.self_attn, block.mlp
        first = Sublayer(
            f"{block_name} attention",
            norm=block.input_layernorm,
            body=attention_body(attention),
            row=base_of(attention.o_proj),
            attention=attention,
            modules=(block.input_layernorm, attention),
            draws_own=lambda: attention.training and attention.attention_dropout > 0,
        )
        # with post-norms this norm belongs to attention, else to the MLP
        after = block.post_attention_layernorm
        norm = block.pre_feedforward_layernorm if self.post_norms else after
        second = Sublayer(
            f"{block_name} mlp",
            norm=norm,
            body=mlp_body(mlp),
            row=base_of(mlp.down_proj),
            modules=(norm, mlp),
        )
        if not self.post_norms:
            return first, second

        last = block.post_feedforward_layernorm
        return (
            replace(first, modules=(*first.modules, after), post_norm=after),
            replace(second, modules=(*second.modules, last), post_norm=last),
        )

    @override
    def can_be_scheduled(self, model: Any) -> bool:
        if not self.post_norms:
            return True
        # blocks of Gemma 2 and 3 in older transformers change the mask themselves
        parameters = inspect.signature(type(self.blocks(model)[0]).forward).parameters
        current = "position_embeddings" in parameters and "output_attentions" not in parameters
        both_ways = getattr(model.config, "use_bidirectional_attention", None)
        return current and hasattr(model.config, "layer_types") and not both_ways

    @override
    def returns_tensor(self, block: nn.Module) -> bool:
        # true for every Gemma 2 and 3 model that can be scheduled; Gemma 3's annotation is wrong
        return self.post_norms or super().returns_tensor(block)


def _key_spec(heads: int, key_heads: int, head_dim: int, num_ranks: int) -> ShardSpec:
    """Return the spec for key and value projections; several ranks may hold the same head."""
    if key_heads % num_ranks == 0:
        return ShardSpec.even(0, key_heads * head_dim, num_ranks)

    # each key head serves `per_key` consecutive query heads
    per_rank, per_key = heads // num_ranks, heads // key_heads
    firsts = [rank * per_rank // per_key * head_dim for rank in range(num_ranks)]
    ranges = tuple((first, first + head_dim) for first in firsts)
    return ShardSpec(0, ranges, key_heads * head_dim)


@dataclass(frozen=True)
class GPT2(Family):
    """GPT-2, which adds position embeddings and applies dropout before the first block."""

    base, blocks_name, embedding_name = "transformer", "h", "wte"

    @override
    def check_divisible(self, model: Any, num_ranks: int) -> None:
        heads = model.config.n_head
        check_heads(type(model).__name__, heads, heads, num_ranks)
        for block in self.blocks(model):
            check_width(model, "n_inner", block.mlp.c_fc.weight.shape[1], num_ranks)

    @override
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        ranks, attention, mlp = sharding.group.size, block.attn, block.mlp

        # query, key and value are packed in one weight: take this rank's slice of each third
        packed = attention.c_attn.weight.shape[1]
        column(sharding, attention, "c_attn", ShardSpec.even(1, packed, ranks, num_blocks=3))
        row(sharding, attention, "c_proj")
        dropout(sharding, attention, "resid_dropout")
        sharding.set(attention, "num_heads", attention.num_heads // ranks)
        sharding.set(attention, "split_size", attention.split_size // ranks)

        column(sharding, mlp, "c_fc", ShardSpec.even(1, mlp.c_fc.weight.shape[1], ranks))
        row(sharding, mlp, "c_proj")
        dropout(sharding, mlp, "dropout")

    @override
    def sublayers(self, block_name: str, block: Any) -> Sequence[Sublayer]:
        attention, mlp = block.attn, block.mlp
        return (
            Sublayer(
                f"{block_name} attention",
                norm=block.ln_1,
                body=attention_body(attention),
                row=base_of(attention.c_proj),
                dropout=attention.resid_dropout,
                attention=attention,
                modules=(block.ln_1, attention),
                draws_own=lambda: attention.training and attention.attn_dropout.p > 0,
            ),
            Sublayer(
                f"{block_name} mlp",
                norm=block.ln_2,
                body=mlp_body(mlp),
                row=base_of(mlp.c_proj),
                dropout=mlp.dropout,
                modules=(block.ln_2, mlp),
            ),
        )


# Gemma scales the embedding, which older transformers do outside the embedding module. So
# `raw_embedding` is False for Gemma with any version.
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": GPT2(),
    "LlamaForCausalLM": Llama(raw_embedding=True),
    "MistralForCausalLM": Llama(raw_embedding=True),
    "Qwen2ForCausalLM": Llama(raw_embedding=True),
    "Qwen3ForCausalLM": Llama(raw_embedding=True, head_norms=True),
    "GemmaForCausalLM": Llama(),
    "Gemma2ForCausalLM": Llama(post_norms=True),
    "Gemma3ForCausalLM": Llama(post_norms=True, head_norms=True),
}
"""The scheduled architectures, by class name in transformers."""


def family_of(model: nn.Module) -> Family | None:
    """Return a model's architecture, or None if it is not in `FAMILIES`."""
    return FAMILIES.get(type(model).__name__)
