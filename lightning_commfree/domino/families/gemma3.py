"""Gemma 3's text models: Gemma 2's modules, and Qwen3's norms of queries and keys."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from lightning_commfree.domino.families.gemma2 import Gemma2
from lightning_commfree.domino.sharding import Sharding


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
