"""The architectures of transformers that are scheduled, a file for each.

A new one is a `Family` in a file of its own, and its name in the list below. transformers is not
imported, so that the library does not need it: a model is known by the name of its class.

What an architecture has to say of itself, so that its models are divided and scheduled.

Llama, and what its relatives share: rotary positions, RMS norms, SwiGLU, grouped key heads.

Gemma: Llama's modules, and an embedding that is scaled.

Gemma 2: a norm behind each sum as well, and blocks whose attention has a sliding window.

Gemma 3's text models: Gemma 2's modules, and Qwen3's norms of queries and keys.

GPT-2: learned positions, layer norms, one hidden layer in the MLP, dropout behind both.

Its linears are `Conv1D`, whose weight is (in, out), and query, key and value are one of them.

Mistral: Llama's modules. Its sliding window is in the mask, which transformers makes.

Qwen2: Llama's modules, with biases on query, key and value, which go with their rows.

Qwen3: Llama's modules, and in attention a norm of queries and one of keys, over one head.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
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


class Family(ABC):
    """An architecture: a causal language model of equal blocks, each attention and then an MLP.

    Attributes:
        model_class: name of the class in transformers.
        embedding_is_stream: the first block gets the embedding as it is.
    """

    model_class: ClassVar[str]
    embedding_is_stream: ClassVar[bool] = False

    @abstractmethod
    def check(self, model: Any, ranks: int) -> None:
        """See that a model can be divided; it is not changed.

        Raises:
            ValueError: heads or widths do not fit the ranks.
        """

    def can_be_scheduled(self, model: Any) -> bool:
        """Return whether its blocks do nothing but what their sublayers do."""
        del model
        return True

    def returns_tensor(self, block: nn.Module) -> bool:
        """Return whether a block returns its output as it is, and not in a tuple."""
        returned = inspect.signature(type(block).forward).return_annotation
        return "tuple" not in str(returned).lower()

    @abstractmethod
    def blocks(self, model: Any) -> nn.ModuleList:
        """Return the blocks, in order."""

    @abstractmethod
    def embedding(self, model: Any) -> tuple[nn.Module, str]:
        """Return the owner of the words' embedding, and its name there."""

    @abstractmethod
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        """Divide one block."""

    @abstractmethod
    def sublayers(self, name: str, block: Any) -> Sequence[Sublayer]:
        """Return the sublayers of a divided block, in order.

        Args:
            name: of the block.
            block: divided.
        """

    def vocabulary(self, model: Any) -> tuple[nn.Module, nn.Module]:
        """Return embedding and head."""
        return getattr(*self.embedding(model)), model.lm_head

    def shard(self, sharding: Sharding) -> None:
        """Divide a model, block by block."""
        model = sharding.model
        blocks = self.blocks(model)
        for block in blocks:
            sharding.materializer.materialize(block)
            self.shard_block(sharding, block)
        vocabulary(sharding, self.embedding(model), (model, "lm_head"))

        if not self.can_be_scheduled(model):
            return
        sharding.blocks = blocks
        sharding.sublayers = [
            sublayer
            for i, block in enumerate(blocks)
            for sublayer in self.sublayers(f"layer {i}", block)
        ]
        sharding.embedding_is_stream = self.embedding_is_stream


class Llama(Family):
    """The first block gets the embedding as it is; there is no dropout but attention's."""

    model_class = "LlamaForCausalLM"
    embedding_is_stream = True

    @override
    def check(self, model: Any, ranks: int) -> None:
        heads, key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        check_heads(type(model).__name__, heads, key_heads, ranks)
        block: Any
        for block in self.blocks(model):
            width = block.mlp.gate_proj.weight.shape[0]
            check_width(model, "intermediate_size", width, ranks)

    @override
    def blocks(self, model: Any) -> nn.ModuleList:
        blocks: nn.ModuleList = model.model.layers
        return blocks

    @override
    def embedding(self, model: Any) -> tuple[nn.Module, str]:
        return model.model, "embed_tokens"

    @override
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        self.shard_attention(sharding, block.self_attn)

        mlp, ranks = block.mlp, sharding.group.size
        spec = ShardSpec.even(0, mlp.gate_proj.weight.shape[0], ranks)
        for name in ("gate_proj", "up_proj"):
            column(sharding, mlp, name, spec)
        row(sharding, mlp, "down_proj")

    def shard_attention(self, sharding: Sharding, attention: Any) -> None:
        """Divide the heads of one block."""
        config, ranks = attention.config, sharding.group.size
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = attention.head_dim

        column(sharding, attention, "q_proj", ShardSpec.even(0, heads * head_dim, ranks))
        spec = key_spec(heads, key_heads, head_dim, ranks)
        for name in ("k_proj", "v_proj"):
            column(sharding, attention, name, spec)
        row(sharding, attention, "o_proj")

        groups = (heads // ranks) // max(key_heads // ranks, 1)
        sharding.set(attention, "num_key_value_groups", groups)

    @override
    def sublayers(self, name: str, block: Any) -> Sequence[Sublayer]:
        attention, mlp = block.self_attn, block.mlp
        return (
            Sublayer(
                f"{name} attention",
                norm=block.input_layernorm,
                body=attention_body(attention),
                row=base_of(attention.o_proj),
                attention=attention,
                modules=(block.input_layernorm, attention),
                draws_own=lambda: attention.training and attention.attention_dropout > 0,
            ),
            Sublayer(
                f"{name} mlp",
                norm=block.post_attention_layernorm,
                body=mlp_body(mlp),
                row=base_of(mlp.down_proj),
                modules=(block.post_attention_layernorm, mlp),
            ),
        )


def key_spec(heads: int, key_heads: int, head_dim: int, ranks: int) -> ShardSpec:
    """Return how keys and values are divided; several ranks hold one head if there are too few.

    Args:
        heads: of the queries.
        key_heads: of keys and values; each serves as many consecutive heads of the queries.
        head_dim: numbers of a head.
        ranks: of the tensor group.
    """
    if key_heads % ranks == 0:
        return ShardSpec.even(0, key_heads * head_dim, ranks)

    per_rank = heads // ranks
    firsts = [rank * per_rank // (heads // key_heads) for rank in range(ranks)]
    ranges = tuple((first * head_dim, (first + 1) * head_dim) for first in firsts)
    return ShardSpec(0, ranges, key_heads * head_dim)


class Gemma(Llama):
    """Its scale stands in the embedding or, in older transformers, behind it."""

    model_class = "GemmaForCausalLM"
    embedding_is_stream = False


class Gemma2(Gemma):
    """As Gemma; in older transformers, whose blocks make masks of their own, not scheduled."""

    model_class = "Gemma2ForCausalLM"

    @override
    def can_be_scheduled(self, model: Any) -> bool:
        block = type(self.blocks(model)[0])
        takes = inspect.signature(block.forward).parameters
        as_now = "position_embeddings" in takes and "output_attentions" not in takes
        both_ways = getattr(model.config, "use_bidirectional_attention", None)
        return as_now and hasattr(model.config, "layer_types") and not both_ways

    @override
    def sublayers(self, name: str, block: Any) -> Sequence[Sublayer]:
        attention, mlp = super().sublayers(name, block)
        behind, ahead = block.post_attention_layernorm, block.pre_feedforward_layernorm
        end = block.post_feedforward_layernorm
        return (
            replace(attention, modules=(*attention.modules, behind), norm_behind=behind),
            replace(mlp, norm=ahead, modules=(ahead, block.mlp, end), norm_behind=end),
        )


class Gemma3(Gemma2):
    """One norm serves all heads, and a rank's sees only the rank's own."""

    model_class = "Gemma3ForCausalLM"

    @override
    def returns_tensor(self, block: nn.Module) -> bool:
        del block
        return True  # whatever its annotation says

    @override
    def shard_attention(self, sharding: Sharding, attention: Any) -> None:
        super().shard_attention(sharding, attention)
        for norm in (attention.q_norm, attention.k_norm):
            sharding.share(norm)


class GPT2(Family):
    """Between embedding and first block it adds positions and draws dropout."""

    model_class = "GPT2LMHeadModel"

    @override
    def check(self, model: Any, ranks: int) -> None:
        heads = model.config.n_head
        check_heads(type(model).__name__, heads, heads, ranks)
        block: Any
        for block in self.blocks(model):
            check_width(model, "n_inner", block.mlp.c_fc.weight.shape[1], ranks)

    @override
    def blocks(self, model: Any) -> nn.ModuleList:
        blocks: nn.ModuleList = model.transformer.h
        return blocks

    @override
    def embedding(self, model: Any) -> tuple[nn.Module, str]:
        return model.transformer, "wte"

    @override
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        ranks, attention, mlp = sharding.group.size, block.attn, block.mlp

        packed = attention.c_attn.weight.shape[1]
        column(sharding, attention, "c_attn", ShardSpec.even(1, packed, ranks, blocks=3))
        row(sharding, attention, "c_proj")
        dropout(sharding, attention, "resid_dropout")
        sharding.set(attention, "num_heads", attention.num_heads // ranks)
        sharding.set(attention, "split_size", attention.split_size // ranks)

        column(sharding, mlp, "c_fc", ShardSpec.even(1, mlp.c_fc.weight.shape[1], ranks))
        row(sharding, mlp, "c_proj")
        dropout(sharding, mlp, "dropout")

    @override
    def sublayers(self, name: str, block: Any) -> Sequence[Sublayer]:
        attention, mlp = block.attn, block.mlp
        return (
            Sublayer(
                f"{name} attention",
                norm=block.ln_1,
                body=attention_body(attention),
                row=base_of(attention.c_proj),
                dropout=attention.resid_dropout,
                attention=attention,
                modules=(block.ln_1, attention),
                draws_own=lambda: attention.training and attention.attn_dropout.p > 0,
            ),
            Sublayer(
                f"{name} mlp",
                norm=block.ln_2,
                body=mlp_body(mlp),
                row=base_of(mlp.c_proj),
                dropout=mlp.dropout,
                modules=(block.ln_2, mlp),
            ),
        )


class Mistral(Llama):
    """As Llama."""

    model_class = "MistralForCausalLM"


class Qwen2(Llama):
    """As Llama."""

    model_class = "Qwen2ForCausalLM"


class Qwen3(Llama):
    """One norm serves all heads, and a rank's sees only the rank's own."""

    model_class = "Qwen3ForCausalLM"

    @override
    def shard_attention(self, sharding: Sharding, attention: Any) -> None:
        super().shard_attention(sharding, attention)
        for norm in (attention.q_norm, attention.k_norm):
            sharding.share(norm)


FAMILIES: dict[str, Family] = {
    family.model_class: family
    for family in (GPT2(), Llama(), Mistral(), Qwen2(), Qwen3(), Gemma(), Gemma2(), Gemma3())
}
"""The families that are scheduled, by the name of their class in transformers."""


def family_of(model: nn.Module) -> Family | None:
    """Return how a model is divided and scheduled; None for an architecture that is not here."""
    return FAMILIES.get(type(model).__name__)


__all__ = ["FAMILIES", "Family", "family_of"]
