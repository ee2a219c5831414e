"""A transformer block as two sublayers, from the modules that transformers made.

A sublayer is what lies between two all-reduces: the residual stream h comes in with the sum y of
the sublayer before, and a partial sum goes out.

    h <- h + finish(y)        of the sublayer before: what wants the whole sum
    x <- norm(h)
    partial <- body(x)        column linears, attention or activation, row linear

Its collectives lie between the lines: the sum of the partials, and in backward that of dx.

One sublayer of one micro-batch, and what it keeps between forward and backward.

Every micro-sublayer has graphs of its own: what comes in are leaves, and backward leaves their
gradients there.

    entered <- h + finish(y)     h and y are leaves
    normed  <- norm(entered)
    outputs <- body(x)           x is a leaf with the values of `normed`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
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
        post_norm: the same.
        attention: None for an MLP.
        draws_own: whether the body now draws random numbers that differ from rank to rank.
    """

    name: str
    norm: nn.Module
    body: Body
    row: RowLinear
    modules: tuple[nn.Module, ...]
    dropout: DropoutAfterSum | None = None
    post_norm: nn.Module | None = None
    attention: nn.Module | None = None
    draws_own: Callable[[], bool] = lambda: False

    def finish(self, total: Tensor) -> Tensor:
        """Make the sublayer's output of the sum of all ranks' partial ones."""
        total = self.row.finish(total)
        if self.post_norm is not None:
            total = self.post_norm(total)
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


Arguments = dict[str, Any]


def leaf(tensor: Tensor) -> Tensor:
    """Return a leaf with the same values, which wants a gradient."""
    return tensor.detach().requires_grad_()


def take_gradient(leaf: Tensor) -> Tensor:
    """Return what backward has left at a leaf, and forget it there."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "a sublayer depends on all that comes in"
    return gradient


@dataclass(frozen=True)
class Inflow:
    """What comes into a sublayer.

    Attributes:
        leaves: the residual stream h, shape (B, T, H), and behind a sublayer its sum y.
        finish: makes the output of the sublayer before out of y; None if there is none before.
    """

    leaves: tuple[Tensor, ...]
    finish: Callable[[Tensor], Tensor] | None = None

    def add(self) -> Tensor:
        """Return the residual stream, with its graph."""
        if self.finish is None:
            (stream,) = self.leaves
            return stream.view_as(stream)  # a graph of its own, down to the leaf

        stream, total = self.leaves
        return stream + self.finish(total)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the leaves, once."""
        return [take_gradient(leaf) for leaf in self.leaves]


@dataclass(frozen=True)
class MicroInput:
    """What a micro-sublayer is computed from; with activation checkpointing all that is kept.

    Attributes:
        sublayer: which one.
        arguments: what transformers passes to its block besides the hidden state.
        inflow: what comes in.
        replayed: makes a context in which random numbers are the same again.
    """

    sublayer: Sublayer
    arguments: Arguments
    inflow: Inflow
    replayed: Callable[[], AbstractContextManager[None]] = nullcontext


class LentTensor:
    """A key or value tensor of one micro-batch, and the leaves that later ones use in its place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._lent: list[Tensor] = []

    def lend(self) -> Tensor:
        """Return a leaf with the same values."""
        lent = leaf(self._tensor)
        self._lent.append(lent)
        return lent

    def gradient(self) -> Tensor:
        """Return the sum of what the leaves have got in backward."""
        total = torch.zeros_like(self._tensor)
        for lent in self._lent:
            if lent.grad is not None:
                total += lent.grad
        return total


class MicroSublayer:
    """One sublayer of one micro-batch, with its graphs.

    Args:
        source: what it is computed from.

    Attributes:
        entered: h + finish(y), with its graph.
        normed: its norm, with its graph.
        x: the same, a leaf.
        outputs: of the body, with their graph.
        lent: what later micro-batches use of it.
    """

    def __init__(self, source: MicroInput) -> None:
        self.source = source
        self.sublayer = source.sublayer
        self.entered = source.inflow.add()
        self.normed = self.sublayer.norm(self.entered)
        self.x = leaf(self.normed)
        self.outputs: list[Tensor] = []
        self.lent: list[LentTensor] = []

    def body(self, more: Arguments | None = None) -> Tensor:
        """Return what the body makes of `x`.

        Args:
            more: arguments besides its own.
        """
        # a view: autocast would keep the half-precision copy of a leaf, and add its gradients there
        partial: Tensor = self.sublayer.body(
            self.x.view_as(self.x), {**self.source.arguments, **(more or {})}
        )
        return partial

    def backward_body(self, gradients: list[Tensor]) -> Tensor:
        """Return the gradient of `x`; those of the parameters are accumulated.

        Args:
            gradients: of the outputs, whose graph is used up.
        """
        torch.autograd.backward(self.outputs, gradients)
        self.outputs, self.lent = [], []
        return take_gradient(self.x)

    def backward_entry(self, d_entered: Tensor, d_normed: Tensor) -> list[Tensor]:
        """Return the gradients of what came in, that of h first; the graph is used up.

        Args:
            d_entered: of the residual stream behind this sublayer.
            d_normed: of `x`, summed over the tensor group.
        """
        torch.autograd.backward([self.entered, self.normed], [d_entered, d_normed])
        del self.entered, self.normed, self.x
        return self.source.inflow.gradients()
