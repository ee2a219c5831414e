"""A transformer block as two sublayers, and one sublayer's computation for one micro-batch.

A sublayer is the computation between two all-reduces. Its inputs are the residual stream h and the
all-reduced sum y of the previous sublayer, and its output is a partial sum:

    h <- h + finish(y)        bias, post-norm and dropout of the previous sublayer
    x <- norm(h)
    partial <- body(x)        column linears, attention or activation, row linear

A `MicroSublayer` has a separate autograd graph for each of these lines. The inputs of each graph
are leaves that accumulate gradients, so that the schedule controls when each part of backward runs:

    entered <- h + finish(y)     h and y are leaves
    normed  <- norm(entered)
    outputs <- body(x)           x is a leaf that equals `normed`

The weights of the body's linear layers have a graph of their own, so that the all-reduce of x's
gradient can be launched before their gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.domino.layers import (
    DropoutAfterSum,
    LinearCall,
    RowLinear,
    weight_gradients,
)

Arguments = dict[str, Any]  # a block's keyword arguments, without the hidden state
Body = Callable[[Tensor, Arguments], Tensor]


@dataclass(frozen=True)
class Sublayer:
    """One sublayer of a sharded block."""

    name: str  # in traces
    norm: nn.Module  # computes the body's input x from the residual stream h
    body: Body  # computes this rank's partial sum from x and the block's arguments
    row: RowLinear  # the last linear layer of the body
    modules: tuple[nn.Module, ...]  # they hold the sublayer's parameters, and are used only here
    dropout: DropoutAfterSum | None = None  # applied to the sum
    post_norm: nn.Module | None = None  # applied to the sum before dropout
    attention: nn.Module | None = None  # None for an MLP
    # whether the body draws numbers that must differ between ranks, as attention dropout does
    draws_own: Callable[[], bool] = lambda: False

    def finish(self, total: Tensor) -> Tensor:
        """Apply bias, post-norm and dropout to the all-reduced partial sums."""
        total = self.row.finish(total)
        if self.post_norm is not None:
            total = self.post_norm(total)
        return total if self.dropout is None else self.dropout.finish(total)


def attention_body(module: nn.Module) -> Body:
    """Return a sublayer body that calls an attention module as a transformers block would."""

    def body(x: Tensor, arguments: Arguments) -> Tensor:
        partial: Tensor = module(hidden_states=x, **arguments)[0]  # [1] has the attention weights
        return partial

    return body


def mlp_body(module: nn.Module) -> Body:
    """Return a sublayer body that calls an MLP as a transformers block would."""

    def body(x: Tensor, _: Arguments) -> Tensor:
        partial: Tensor = module(x)
        return partial

    return body


def leaf(tensor: Tensor) -> Tensor:
    """Return a new autograd leaf that shares the memory of `tensor`."""
    return tensor.detach().requires_grad_()


def take_gradient(leaf: Tensor) -> Tensor:
    """Return an autograd leaf's gradient, and clear it."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "a sublayer depends on all of its inputs"
    return gradient


@dataclass(frozen=True)
class InputTensors:
    """Input tensors of one sublayer for one micro-batch, as autograd leaves."""

    # the residual stream h, (B, T, H), and, except in the first sublayer, the previous sublayer's
    # all-reduced sum y
    leaves: tuple[Tensor, ...]
    # the previous sublayer's bias, norm and dropout, for y
    finish: Callable[[Tensor], Tensor] | None = None

    def add(self) -> Tensor:
        """Return the residual stream: h + finish(y), or h in the first sublayer."""
        if self.finish is None:
            (stream,) = self.leaves
            return stream.view_as(stream)  # a node of its own, whose backward reaches the leaf

        stream, total = self.leaves
        return stream + self.finish(total)

    def take_gradients(self) -> list[Tensor]:
        """Return the leaves' gradients, and clear them."""
        return [take_gradient(leaf) for leaf in self.leaves]


@dataclass(frozen=True)
class MicroInput:
    """Inputs of one sublayer for one micro-batch; activation checkpointing keeps only these."""

    sublayer: Sublayer
    arguments: Arguments  # for this micro-batch
    tensors: InputTensors
    # returns a context manager that repeats the random draws of the forward pass
    replayed: Callable[[], AbstractContextManager[None]] = nullcontext


class ReusedTensor:
    """Keys or values of one micro-batch that the attention of later micro-batches reads.

    Each reader gets a separate autograd leaf, because their backward passes run separately.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._leaves: list[Tensor] = []

    def new_leaf(self) -> Tensor:
        """Return a new autograd leaf for one reader."""
        copy = leaf(self._tensor)
        self._leaves.append(copy)
        return copy

    def gradient(self) -> Tensor:
        """Return the sum of all readers' gradients."""
        total = torch.zeros_like(self._tensor)  # stays zero for the last micro-batch
        for copy in self._leaves:
            if copy.grad is not None:
                total += copy.grad
        return total


class MicroSublayer:
    """One sublayer's computation for one micro-batch, with its autograd graphs.

    The module's docstring describes the graphs of `entered`, `normed` and `outputs`.
    """

    def __init__(self, source: MicroInput) -> None:
        self.source = source
        self.sublayer = source.sublayer
        self.entered = source.tensors.add()
        self.normed = self.sublayer.norm(self.entered)
        self.x = leaf(self.normed)
        self.outputs: list[Tensor] = []  # set by `Split.run`
        # from `weight_gradients`; None if all weights are frozen
        self.weights: Tensor | None = None
        # with `split="token"`, keys and values that later micro-batches read; set by `Split.run`
        self.reused: list[ReusedTensor] = []

    def body(self, more: Arguments | None = None) -> Tensor:
        """Return the body's output for `x` and the block's arguments, updated with `more`."""
        # a view, because autocast caches half-precision copies of leaves, and gradients would
        # accumulate in the cached copy
        partial: Tensor = self.sublayer.body(
            self.x.view_as(self.x), {**self.source.arguments, **(more or {})}
        )
        return partial

    def backward_body(self, gradients: list[Tensor]) -> Tensor:
        """Run backward from the outputs' gradients; return the gradient of `x`.

        The gradients of linear layers' weights are left to `backward_weights`.
        """
        # in one call, because keys, values and output share the body's graph
        torch.autograd.backward(self.outputs, gradients)
        self.outputs, self.reused = [], []
        return take_gradient(self.x)

    def backward_weights(self, recomputed: list[LinearCall]) -> None:
        """Compute the gradients of the linear layers' weights and biases.

        `recomputed` contains the linear layers that were called during `backward_body`, because a
        user checkpoints activations of a module inside the body.
        """
        handles = [h for h in (self.weights, weight_gradients(recomputed)) if h is not None]
        if handles:
            torch.autograd.backward(handles, [handle.detach() for handle in handles])
        self.weights = None

    def backward_entry(
        self,
        d_entered: Tensor,  # from the sublayers that follow
        d_normed: Tensor,  # gradient of `x`, summed over the tensor group
    ) -> list[Tensor]:
        """Run backward through the norm and the residual sum; return the gradients of h and y."""
        # in one call, because both paths share the graph of the residual stream
        torch.autograd.backward([self.entered, self.normed], [d_entered, d_normed])
        # free the activations now: this object lives until the next sublayer
        del self.entered, self.normed, self.x
        return self.source.tensors.take_gradients()
