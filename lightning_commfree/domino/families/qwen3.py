"""Qwen3: Llama's modules, and in attention a norm of queries and one of keys, over one head."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_commfree.domino.families.llama import Llama
from lightning_commfree.domino.sharding import Sharding


class Qwen3(Llama):
    """One norm serves all heads, and a rank's sees only the rank's own."""

    model_class = "Qwen3ForCausalLM"

    @override
    def shard_attention(self, sharding: Sharding, attention: Any) -> None:
        super().shard_attention(sharding, attention)
        for norm in (attention.q_norm, attention.k_norm):
            sharding.share(norm)
