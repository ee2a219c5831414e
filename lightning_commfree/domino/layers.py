"""Sharded linear layers, embedding and head that keep the original modules' parameter names.

t is the number of ranks in the tensor group. While a schedule runs a module
(`TensorGroup.under_schedule`), the schedule performs the module's all-reduces. Otherwise, for
example in evaluation and generation, the module performs them itself, so its output is always
correct.

================  ====================  ============================  =======================
module            a rank's weight       forward, unscheduled          backward, unscheduled
================  ====================  ============================  =======================
`ColumnLinear`    1/t of the outputs    x w                           all-reduce of dx
`RowLinear`       1/t of the inputs     all-reduce of x w, plus bias  dy unchanged
`GatheredLinear`  1/t of the outputs    all-gather of x w             all-reduce of dx
`SplitRowLinear`  1/t of the inputs     all-reduce of (1/t of x) w    all-gather of dx
`VocabEmbedding`  1/t of the words      all-reduce of rows found      dy unchanged
`VocabHead`       1/t of the words      all-gather of logits          all-reduce of dx
================  ====================  ============================  =======================

`GatheredLinear` and `SplitRowLinear` are for models that are sharded by the plan in their config.
Some of these models need full activations on every rank.

Under a schedule, the backward pass of a linear layer computes only dx. The gradients of its weight
and bias are computed later (`weight_gradients`), after the schedule has launched dx's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from lightning_commfree.comm.channel import Channel, Pending

FORWARD_TAG = "tensor_forward"
BACKWARD_TAG = "tensor_backward"

Trace = Callable[[str, str, int], None]  # called with event, sublayer, micro-batch


class TensorGroup:
    """The ranks that share a model, and the state that its sharded modules have in common."""

    def __init__(self, channel: Channel, seed: int = 0) -> None:
        self.channel = channel  # for tensors on the model's device
        # whether a schedule performs the all-reduces: if so, `RowLinear` returns partial sums, and
        # the input gradients of `ColumnLinear` are partial sums
        self.scheduled = False
        self.local_logits = False  # whether the head returns only the logits of this rank's words
        self.overlap_embedding = False  # whether its all-reduce is left to the schedule
        # the embedding's partial sum, from its forward until the schedule takes it
        self.unsummed: Tensor | None = None
        self.calls: list[LinearCall] = []  # of linear layers, in the current `under_schedule`
        self._casts: dict[Tensor, Tensor] | None = None
        # random numbers that must differ between ranks, as in attention dropout
        self._own_random = torch.Generator().manual_seed(seed + 1 + channel.rank).get_state()
        self._own_device_random: Tensor | None = None
        self._seed = seed

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.channel.size

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.channel.rank

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Start a sum over the group, in place if contiguous; nccl runs it on a separate stream."""
        return self.channel.all_reduce(tensor.contiguous(), tag)

    @contextmanager
    def under_schedule(self) -> Iterator[list[LinearCall]]:
        """Context manager in which modules leave all-reduces to the schedule; yields `LinearCall`s.

        They also leave the gradients of linear layers' weights to it: yields the list to which each
        call of a linear layer is added.
        """
        before = self.scheduled, self.calls
        self.scheduled, self.calls = True, []
        try:
            yield self.calls
        finally:
            self.scheduled, self.calls = before

    @contextmanager
    def sharing_casts(self) -> Iterator[None]:
        """Context manager in which `autocast` casts each weight once, like autocast's own cache.

        Autocast caches only parameters, and a linear layer under a schedule uses detached ones.
        """
        before, self._casts = self._casts, {}
        try:
            yield
        finally:
            self._casts = before

    def autocast(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the autocast dtype, unless it is fp64; autocast must be enabled."""
        if tensor.dtype == torch.float64:  # autocast leaves it alone
            return tensor
        dtype = torch.get_autocast_dtype(tensor.device.type)
        if self._casts is None or not tensor.is_leaf:
            return tensor.to(dtype)

        if tensor not in self._casts:
            self._casts[tensor] = tensor.to(dtype)
        return self._casts[tensor]

    @contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """Context manager in which random draws use this rank's own generators."""
        shared, on_device = random_state(device)

        # the device's generator is seeded on first use, because the device is not known before
        if self._own_device_random is None and on_device is not None:
            torch.manual_seed(self._seed + 1 + self.rank)
            self._own_device_random = random_state(device)[1]

        set_random_state(device, (self._own_random, self._own_device_random))
        try:
            yield
        finally:
            self._own_random, self._own_device_random = random_state(device)
            set_random_state(device, (shared, on_device))

    def own_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the state of this rank's own generators: the CPU's and, if used, the device's."""
        return self._own_random, self._own_device_random

    def load_own_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        """Restore the state returned by `own_state`."""
        self._own_random, self._own_device_random = state

    def random_states(self, device: torch.device) -> tuple[Any, Any]:
        """Return the states of the shared generators and of this rank's own generators."""
        return random_state(device), self.own_state()

    @contextmanager
    def replayed(self, device: torch.device, states: tuple[Any, Any]) -> Iterator[None]:
        """Context manager that repeats the random draws made after `random_states` was called."""
        now = self.random_states(device)
        self._set_random_states(device, states)
        try:
            yield
        finally:
            self._set_random_states(device, now)

    def _set_random_states(self, device: torch.device, states: tuple[Any, Any]) -> None:
        shared, (self._own_random, self._own_device_random) = states
        set_random_state(device, shared)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return torch's RNG states of the CPU and, if `device` is a CUDA device, of `device`."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Restore the state returned by `random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class _AllReduceInBackward(torch.autograd.Function):
    """Identity in forward, all-reduce of the gradient in backward (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grads
        # a copy: all-reduce is in place, and autograd may use the gradient elsewhere too
        return ctx.group.all_reduce(gradient.clone(), BACKWARD_TAG).wait(), None


class _AllReduceInForward(torch.autograd.Function):
    """All-reduce in forward, identity in backward (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.all_reduce(x.clone(), FORWARD_TAG).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """All-gather along the last dimension in forward, this rank's slice in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        rows = group.channel.all_gather(x.contiguous(), FORWARD_TAG).wait()
        return torch.cat(rows.unbind(0), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return this rank's slice of the gradient, without a sum over ranks."""
        return grads[0].chunk(ctx.group.size, dim=-1)[ctx.group.rank].contiguous(), None


class _Slice(torch.autograd.Function):
    """This rank's slice of the last dimension in forward, all-gather of gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size, dim=-1)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the full input, gathered from all ranks."""
        slices = ctx.group.channel.all_gather(grads[0].contiguous(), BACKWARD_TAG).wait()
        return torch.cat(slices.unbind(0), dim=-1), None


class _Head(torch.autograd.Function):
    """Language model head, x w^T; backward computes dw during the all-reduce of dx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
        # autocast does not apply inside a Function: cast as it does for `F.linear`
        kind = x.device.type
        ctx.group, ctx.dtypes = group, (x.dtype, weight.dtype)
        if torch.is_autocast_enabled(kind):
            x, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (x, weight))

        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of x, all-reduced, and of the weight."""
        (gradient,), (x, weight) = grads, ctx.saved_tensors
        d_x = (gradient @ weight).to(ctx.dtypes[0])
        in_flight = ctx.group.all_reduce(d_x, BACKWARD_TAG)

        # this product overlaps with the all-reduce; a frozen head does not need it
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            d_weight = d_weight.to(ctx.dtypes[1])

        return in_flight.wait(), d_weight, None


@dataclass(eq=False)
class LinearCall:
    """A call of a linear layer under a schedule: y = x w + b."""

    x: Tensor  # without its graph
    weight: Tensor  # under autocast, its copy in the autocast dtype
    bias: Tensor | None  # likewise
    transposed: bool  # as in `_Linear`
    d_y: Tensor | None = None  # gradient of y, once backward has reached it

    def receive(self, d_y: Tensor) -> None:
        """Keep the gradient of the output, for `weight_gradients`."""
        self.d_y = d_y


class _WeightGradients(torch.autograd.Function):
    """Gradients of weights and biases of several `LinearCall`s, in a graph apart from x and y."""

    @staticmethod
    def forward(ctx: Any, calls: list[LinearCall], *parameters: Tensor | None) -> Tensor:
        """Return an empty tensor, from which backward starts."""
        ctx.calls = calls
        ctx.save_for_backward(*(call.x for call in calls))
        return calls[0].x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of each call's weight and bias, in turn."""
        found: list[Tensor | None] = [None]
        for call, x, i in zip(ctx.calls, ctx.saved_tensors, count(1, 2), strict=False):
            d_weight = d_bias = None
            if call.d_y is not None:  # the output may be unused
                d_y, x = call.d_y.flatten(0, -2), x.flatten(0, -2)
                if ctx.needs_input_grad[i]:
                    d_weight = x.T @ d_y if call.transposed else d_y.T @ x
                if ctx.needs_input_grad[i + 1]:
                    d_bias = d_y.sum(0)
            found += [d_weight, d_bias]
        return tuple(found)


def weight_gradients(calls: list[LinearCall]) -> Tensor | None:
    """Return an empty tensor whose backward pass computes the gradients of weights and biases.

    Call this function after the forward pass of the layers. Return None without `calls`.
    """
    if not calls:
        return None
    parameters = [p for call in calls for p in (call.weight, call.bias)]
    handle: Tensor = _WeightGradients.apply(calls, *parameters)  # type: ignore[no-untyped-call]
    for call in calls:
        del call.x, call.weight, call.bias  # now owned by the graph
    return handle


def spread(x: Tensor, group: TensorGroup) -> Tensor:
    """Return `x` unchanged; backward sums its gradient over the group."""
    spread_x: Tensor = _AllReduceInBackward.apply(x, group)  # type: ignore[no-untyped-call]
    return spread_x


def summed(x: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of `x` over the group; backward passes the gradient through unchanged."""
    total: Tensor = _AllReduceInForward.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def gathered(x: Tensor, group: TensorGroup) -> Tensor:
    """Concatenate `x` from all ranks along the last dimension; backward takes this rank's slice."""
    full: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return full


class _Linear(nn.Module):
    """Base class of the sharded linear layers."""

    def __init__(
        self,
        weight: nn.Parameter,  # this rank's shard
        bias: nn.Parameter | None,  # this rank's shard, or the full bias
        group: TensorGroup,
        transposed: bool = False,  # weight of shape (in, out), as in GPT-2's `Conv1D`
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.transposed = group, transposed

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight if `transposed`, else x @ weight.T; plus `bias` unless it is None.

        Under a schedule, backward leaves the gradients of both to `weight_gradients`.
        """
        group = self.group
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        learns = trained and x.requires_grad and torch.is_grad_enabled()
        # a compiler would have to break its graph at the hook
        if not (learns and group.scheduled) or torch.compiler.is_compiling():
            return F.linear(x, weight.T if self.transposed else weight, bias)

        if torch.is_autocast_enabled(x.device.type):
            x, weight = group.autocast(x), group.autocast(weight)
            bias = None if bias is None else group.autocast(bias)
        fixed = weight.detach().T if self.transposed else weight.detach()
        y = F.linear(x, fixed, None if bias is None else bias.detach())

        call = LinearCall(x.detach(), weight, bias, self.transposed)
        y.register_hook(call.receive)  # type: ignore[no-untyped-call]
        group.calls.append(call)
        return y


class ColumnLinear(_Linear):
    """Linear layer sharded by outputs: each rank computes some outputs from the full input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, shape (..., out / t)."""
        x = x if self.group.scheduled else spread(x, self.group)
        return self.product(x, self.weight, self.bias)


class RowLinear(_Linear):
    """Linear layer sharded by inputs: each rank computes a partial sum of all outputs."""

    _launch: Callable[[Tensor], None] | None = None
    _num_slices = 1
    _computed: list[Tensor]

    @contextmanager
    def sliced(self, num_slices: int, launch: Callable[[Tensor], None]) -> Iterator[list[Tensor]]:
        """Context manager in which `forward` computes and launches slices; yields them in a list.

        `launch` is called with each slice as soon as it has been computed, to start its all-reduce.
        Yields a list to which `forward` appends the slices, with their autograd graphs.
        """
        self._launch, self._num_slices, self._computed = launch, num_slices, []
        try:
            yield self._computed
        finally:
            self._launch = None

    def _slices(self, x: Tensor, launch: Callable[[Tensor], None]) -> Tensor:
        """Compute and launch the output slice by slice; return the last slice."""
        for weight in self.weight.tensor_split(self._num_slices, dim=1 if self.transposed else 0):
            output = self.product(x, weight)
            self._computed.append(output)
            launch(output)
        return output  # unused: the schedule concatenates the sums when they land

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, shape (..., out); under a schedule, the partial sum without bias."""
        if self._launch is not None:  # under `split="weight"` or "hybrid"
            return self._slices(x, self._launch)
        if self.group.scheduled:
            return self.product(x, self.weight)

        return self.finish(summed(self.product(x, self.weight), self.group))

    def finish(self, total: Tensor) -> Tensor:
        """Add the bias, if any, to the all-reduced output."""
        return total if self.bias is None else total + self.bias


class GatheredLinear(ColumnLinear):
    """Column-parallel linear layer that gathers its outputs, e.g. before a norm over all heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs, shape (..., out)."""
        return gathered(super().forward(x), self.group)


class SplitRowLinear(RowLinear):
    """Row-parallel linear layer that takes the full input, but uses only this rank's slice."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, shape (..., out)."""
        return super().forward(_Slice.apply(x, self.group))  # type: ignore[no-untyped-call]


class DropoutAfterSum(nn.Dropout):
    """Dropout after a `RowLinear`; under a schedule, `finish` applies it instead of `forward`."""

    def __init__(self, p: float, group: TensorGroup) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout, except under a schedule."""
        return input if self.group.scheduled else super().forward(input)

    def finish(self, total: Tensor) -> Tensor:
        """Apply dropout to the all-reduced output."""
        return super().forward(total)


class VocabEmbedding(nn.Module):
    """Word embedding sharded along the vocabulary."""

    scale: Tensor | None

    def __init__(
        self,
        weight: nn.Parameter,  # this rank's rows, (V / t, H), where V is padded
        first: int,  # this rank's first token id
        group: TensorGroup,
        padding_idx: int | None = None,  # token id whose row gets no gradient
        scale: Tensor | None = None,  # factor of the embeddings, as in Gemma
    ) -> None:
        super().__init__()
        self.weight, self.first, self.group = weight, first, group
        self.padding_idx = padding_idx
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings, shape (..., H); if the schedule sums them, this rank's part."""
        # look up row 0 for words that other ranks hold, and zero it: in the sum over ranks, each
        # word gets its row from the rank that holds it
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))

        skip = None if self.padding_idx is None else self.padding_idx - self.first
        if skip is not None and not 0 <= skip < len(self.weight):
            skip = None

        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, skip)
        partial = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.scale is not None:
            partial = partial * self.scale.to(partial.dtype)

        # a user's forward hook must not get a partial sum
        if self.group.overlap_embedding and not self._forward_hooks:
            self.group.unsummed = partial
            return partial
        return summed(partial, self.group)


class VocabHead(nn.Module):
    """Language model head sharded along the vocabulary."""

    def __init__(
        self,
        weight: nn.Parameter,  # this rank's rows, (V / t, H), where V is padded
        bias: nn.Parameter | None,  # this rank's shard
        num_words: int,  # size of the vocabulary without padding
        group: TensorGroup,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.num_words, self.group = weight, bias, num_words, group

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (..., V), or this rank's, (..., V / t), if `group.local_logits`."""
        local: Tensor = _Head.apply(x, self.weight, self.group)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            local = local + self.bias

        if self.group.local_logits:
            return local

        return gathered(local, self.group)[..., : self.num_words]
