"""Gemma 2: a norm behind each sum as well, and blocks whose attention has a sliding window."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_commfree.domino.families.gemma import Gemma
from lightning_commfree.domino.sublayers import Sublayer


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
