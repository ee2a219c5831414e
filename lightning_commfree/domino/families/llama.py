"""Llama, and what its relatives share: rotary positions, RMS norms, SwiGLU, grouped key heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_commfree.domino.adapters import base_of
from lightning_commfree.domino.divisible import check_heads, check_width
from lightning_commfree.domino.families.base import Family
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sharding import Sharding, column, row
from lightning_commfree.domino.sublayers import Sublayer, attention_body, mlp_body


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
