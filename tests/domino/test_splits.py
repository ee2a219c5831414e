"""Chunks of a sequence attend to each other through a cache, under any of its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.domino.splits import TokenSplit
from lightning_commfree.domino.sublayers import (
    InputTensors,
    MicroInput,
    MicroSublayer,
    Sublayer,
    attention_body,
)


class Newer(nn.Module):
    """Attention's arguments in newer releases: each token sees how many keys there are."""

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> Any:
        keys, _ = past_key_values.update(hidden_states, hidden_states)
        return hidden_states * keys.shape[-2], None


class Older(Newer):
    """In transformers 4.51."""

    def forward(self, hidden_states: Tensor, past_key_value: Any = None, **_: Any) -> Any:
        return super().forward(hidden_states, past_key_value)


class Neither(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return hidden_states, None


def outputs(attention: nn.Module) -> list[float]:
    """Outputs of two chunks of 3 and 2 tokens, all of them ones."""
    split, row = TokenSplit(2), nn.Identity()
    body = attention_body(attention)
    sublayer = Sublayer("layer 0 attention", nn.Identity(), body, row, (), attention=attention)  # type: ignore[arg-type]
    micros: list[MicroSublayer] = []
    launched: list[Tensor] = []
    for chunk in split.micro_batches(torch.ones(1, 5, 1)):
        micro = MicroSublayer(MicroInput(sublayer, {}, InputTensors((chunk.requires_grad_(),))))
        split.run(micro, micros, launched.append)
        micros.append(micro)
    return [float(partial.detach().mean()) for partial in launched]


@pytest.mark.parametrize("attention", [Newer(), Older()], ids=lambda a: type(a).__name__)
def test_a_later_chunk_sees_the_keys_of_the_earlier(attention: nn.Module) -> None:
    assert outputs(attention) == [3.0, 5.0]


def test_attention_without_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="`Neither` does not accept a KV cache"):
        outputs(Neither())
