"""GPT-2: learned positions, layer norms, one hidden layer in the MLP, dropout behind both.

Its linears are `Conv1D`, whose weight is (in, out), and query, key and value are one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_commfree.domino.adapters import base_of
from lightning_commfree.domino.divisible import check_heads, check_width
from lightning_commfree.domino.families.base import Family
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sharding import Sharding, column, dropout, row
from lightning_commfree.domino.sublayers import Sublayer, attention_body, mlp_body


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
