"""A transformer block as two sublayers, from the modules that transformers made.

A sublayer is what lies between two all-reduces: the residual stream h comes in with the sum y of
the sublayer before, and a partial sum goes out.

    h <- h + finish(y)        of the sublayer before: bias and dropout want the whole sum
    x <- norm(h)
    partial <- body(x)        column linears, attention or activation, row linear

Its collectives lie between the lines: the sum of the partials, and in backward that of dx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_commfree.domino.layers import DropoutAfterSum, RowLinear

Body = Callable[[Tensor, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Sublayer:
    """One sublayer; `body` takes what transformers passes to a block besides the hidden state."""

    name: str
    norm: nn.Module
    body: Body
    row: RowLinear
    dropout: DropoutAfterSum | None
    attention: nn.Module | None  # None for an MLP
    modules: tuple[nn.Module, ...]  # whose parameters are used in it

    def finish(self, total: Tensor) -> Tensor:
        """Make the sublayer's output of the sum of all ranks' partial ones."""
        total = self.row.finish(total)
        return total if self.dropout is None else self.dropout.finish(total)

    def draws_own(self) -> bool:
        """Return whether the body draws random numbers that differ from rank to rank."""
        if self.attention is None or not self.attention.training:
            return False
        named = ("attention_dropout", "attn_dropout")
        found = [getattr(self.attention, name, 0.0) for name in named]
        return any(float(getattr(p, "p", p)) > 0 for p in found)


def llama_sublayers(layers: Sequence[Any]) -> list[Sublayer]:
    """Return the sublayers of Llama-like decoder layers: RMS norms, SwiGLU, no dropout."""
    sublayers = []
    for i, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        sublayers.append(
            Sublayer(
                f"layer {i} attention",
                layer.input_layernorm,
                _attention(attention),
                attention.o_proj,
                None,
                attention,
                (layer.input_layernorm, attention),
            )
        )
        sublayers.append(
            Sublayer(
                f"layer {i} mlp",
                layer.post_attention_layernorm,
                _mlp(mlp),
                mlp.down_proj,
                None,
                None,
                (layer.post_attention_layernorm, mlp),
            )
        )
    return sublayers


def gpt2_sublayers(layers: Sequence[Any]) -> list[Sublayer]:
    """Return the sublayers of GPT-2's blocks: layer norms, one hidden layer, dropout behind."""
    sublayers = []
    for i, layer in enumerate(layers):
        attention, mlp = layer.attn, layer.mlp
        sublayers.append(
            Sublayer(
                f"layer {i} attention",
                layer.ln_1,
                _attention(attention),
                attention.c_proj,
                attention.resid_dropout,
                attention,
                (layer.ln_1, attention),
            )
        )
        sublayers.append(
            Sublayer(
                f"layer {i} mlp",
                layer.ln_2,
                _mlp(mlp),
                mlp.c_proj,
                mlp.dropout,
                None,
                (layer.ln_2, mlp),
            )
        )
    return sublayers


def _attention(module: nn.Module) -> Body:
    def body(x: Tensor, arguments: dict[str, Any]) -> Tensor:
        partial: Tensor = module(hidden_states=x, **arguments)[0]
        return partial

    return body


def _mlp(module: nn.Module) -> Body:
    def body(x: Tensor, _: dict[str, Any]) -> Tensor:
        partial: Tensor = module(x)
        return partial

    return body
