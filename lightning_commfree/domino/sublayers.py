"""A transformer block as two sublayers, from the modules that transformers made.

A sublayer is what lies between two all-reduces: the residual stream h comes in with the sum y of
the sublayer before, and a partial sum goes out.

    h <- h + finish(y)        of the sublayer before: what wants the whole sum
    x <- norm(h)
    partial <- body(x)        column linears, attention or activation, row linear

Its collectives lie between the lines: the sum of the partials, and in backward that of dx.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_commfree.domino.layers import DropoutAfterSum, RowLinear

Body = Callable[[Tensor, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Sublayer:
    """One sublayer of a divided block.

    Attributes:
        name: in traces.
        norm: makes x of h.
        body: takes x, and what transformers passes to a block besides the hidden state.
        row: its last linear.
        modules: their parameters are used here and nowhere else.
        dropout: behind the sum; None for none.
        norm_behind: the same.
        attention: None for an MLP.
        draws_own: whether the body now draws random numbers that differ from rank to rank.
    """

    name: str
    norm: nn.Module
    body: Body
    row: RowLinear
    modules: tuple[nn.Module, ...]
    dropout: DropoutAfterSum | None = None
    norm_behind: nn.Module | None = None
    attention: nn.Module | None = None
    draws_own: Callable[[], bool] = lambda: False

    def finish(self, total: Tensor) -> Tensor:
        """Make the sublayer's output of the sum of all ranks' partial ones."""
        total = self.row.finish(total)
        if self.norm_behind is not None:
            total = self.norm_behind(total)
        return total if self.dropout is None else self.dropout.finish(total)


def attention_body(module: nn.Module) -> Body:
    """Return how a block of transformers calls its attention."""

    def body(x: Tensor, arguments: dict[str, Any]) -> Tensor:
        partial: Tensor = module(hidden_states=x, **arguments)[0]
        return partial

    return body


def mlp_body(module: nn.Module) -> Body:
    """Return how a block of transformers calls its MLP."""

    def body(x: Tensor, _: dict[str, Any]) -> Tensor:
        partial: Tensor = module(x)
        return partial

    return body
