"""Gradient operations across ranks: mean across tensor groups, norm, checks for NaN and Inf.

All ranks detect NaN and Inf before the optimizer step. Each rank checks its own gradients before
they are averaged across tensor groups, because the mean would hide which rank has NaN or Inf. The
check computes the norm, which takes one pass and is finite only if all elements are finite. The
norm can also overflow, so if it is not finite, ranks check every element and exchange the names of
the affected parameters.
Another check, before each checkpoint, detects NaN from hooks and from the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_commfree.comm.background import on_host
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.handshake import gather_texts
from lightning_commfree.comm.liveness import AgreedError, PeerWatch
from lightning_commfree.domino.layers import TensorGroup
from lightning_commfree.domino.sharding import ShardSpec
from lightning_commfree.domino.sublayers import Sublayer

AVERAGE_TAG = "data_gradient"
SHARED_TAG = "tensor_shared"
NORM_TAG = "tensor_norm"

# parameters, their gradients at launch, and the all-reduce of these gradients in one flat tensor
InFlight = tuple[list[nn.Parameter], list[Tensor], Pending[Tensor]]


class GradientAverage:
    """Averages gradients across tensor groups during backward."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel  # the ranks with the same shard, one per tensor group
        self.active = True  # whether this backward pass is the last one before an optimizer step
        self._in_flight: list[InFlight] = []
        self._launched: dict[nn.Parameter, tuple[Tensor, int]] = {}  # gradient, version

    def launch_sublayer(self, sublayer: Sublayer) -> None:
        """Start averaging a sublayer's complete gradients, unless another backward will follow."""
        if self.active and self._channel.size > 1:  # send accumulated gradients once, at the end
            self._launch([p for module in sublayer.modules for p in module.parameters()])

    def land(self, parameters: Iterable[nn.Parameter]) -> None:
        """Launch the remaining all-reduces, wait for all of them, and store the mean gradients."""
        if self._channel.size == 1:
            return

        # With two forwards and one backward, the blocks run backward twice: the first run launches
        # a sublayer's gradients, and the second adds to them. So gradients that have changed since
        # their launch are launched again, and the first result is dropped.
        late = {
            p
            for p, (gradient, version) in self._launched.items()
            if p.grad is not gradient or gradient._version != version
        }
        for p in late:
            del self._launched[p]

        early, self._in_flight = self._in_flight, []
        self._launch(parameters)
        again, self._in_flight = self._in_flight, []
        self._launched.clear()

        self._store(early, late)
        self._store(again, set())

    def _store(self, in_flight: Sequence[InFlight], skipped: set[nn.Parameter]) -> None:
        """Wait for the mean gradients, and store them except those of `skipped` parameters."""
        for parameters, gradients, pending in in_flight:
            mean = pending.wait().div_(self._channel.size)
            means = torch.split(mean, [gradient.numel() for gradient in gradients])
            for p, gradient, values in zip(parameters, gradients, means, strict=True):
                if p not in skipped:
                    gradient.copy_(values.view(gradient.shape))

    def _launch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start the all-reduces of gradients that are not in flight, one per dtype."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in parameters:
            if p.grad is not None and p not in self._launched:
                self._launched[p] = (p.grad, p.grad._version)
                by_dtype.setdefault(p.grad.dtype, []).append(p)

        # one flat message per dtype: each small all-reduce would cost its own latency
        for members in by_dtype.values():
            gradients = [self._launched[p][0] for p in members]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            # the channel between tensor groups may use CPU tensors
            in_flight = self._channel.all_reduce(flat.to(self._channel.device), AVERAGE_TAG)
            self._in_flight.append((members, gradients, in_flight))


def sum_shared(specs: Mapping[nn.Parameter, ShardSpec], group: TensorGroup) -> None:
    """Sum the gradients of each shard over the ranks that hold it, in place; collective."""
    # there is no channel for just these ranks: each rank of the group sends its gradient,
    # zero-padded to the full shape
    for parameter, spec in specs.items():
        if spec.overlapping and parameter.grad is not None:
            shape = list(parameter.shape)
            shape[spec.dim] = spec.size
            start, stop = spec.ranges[group.rank]

            full = parameter.grad.new_zeros(shape)
            full.narrow(spec.dim, start, stop - start).copy_(parameter.grad)
            group.all_reduce(full, SHARED_TAG).wait()
            parameter.grad.copy_(full.narrow(spec.dim, start, stop - start))


def gradient_norm(
    parameters: Iterable[nn.Parameter],
    specs: Mapping[nn.Parameter, ShardSpec],  # other parameters are the same on every rank
    group: TensorGroup,
    norm_type: float = 2.0,  # p
) -> Tensor:
    """Return the p-norm of the full model's gradient, 0-d, the same on all ranks; collective."""
    if math.isinf(norm_type):
        largest = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        return group.channel.all_gather(largest, NORM_TAG).wait().amax()

    # norms of gradients that are summed in the same way, so that few kernels compute all of them
    kinds: dict[tuple[bool, int, torch.dtype, torch.device], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            spec = specs.get(p)
            holders = 1 if spec is None else spec.ranges.count(spec.ranges[group.rank])
            kind = (spec is not None, holders, p.grad.dtype, p.grad.device)
            kinds.setdefault(kind, []).append(p.grad.detach())

    total: dict[bool, Tensor] = {}  # key: whether the parameters are sharded
    for (is_sharded, holders, dtype, _), gradients in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(gradients, norm_type, dtype=wide))
        # ranks that hold the same shard each count an equal part of it
        share = norms.pow(norm_type).sum() / holders
        total[is_sharded] = total[is_sharded] + share if is_sharded in total else share

    if not total:  # the same on all ranks, which have the same parameters
        return torch.zeros(())
    first = next(iter(total.values()))
    sharded = total.get(True, torch.zeros_like(first)).reshape(1)
    full = total.get(False, torch.zeros_like(first))  # the same on every rank: not summed
    summed = group.all_reduce(sharded, NORM_TAG).wait().squeeze(0) + full
    return summed.pow(1 / norm_type)


_NAMED = 3  # maximum number of ranks to name in an error


def looks_finite(parameters: Iterable[nn.Parameter], peers: PeerWatch | None = None) -> bool:
    """Return whether the norm of this rank's gradients is finite; synchronizes the device once.

    Raises a `PeerLostError` if the device is waiting for one of `peers` that is lost.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return True
    return bool(on_host(torch.nn.utils.get_total_norm(gradients).isfinite(), peers))


def refuse_nonfinite(
    channel: Channel,  # all ranks of the fit
    module: nn.Module,  # with this rank's gradients before averaging
    loss: Tensor,  # this rank's latest, one element
    step: int,  # the upcoming one, counted from 1
    group_size: int,  # consecutive ranks that share a model
) -> None:
    """Raise the same `AgreedError` on all ranks if any has nonfinite gradients; collective.

    If `looks_finite` is False on any rank, all ranks must call this function. It raises nothing if
    only the norm overflowed.
    """
    value = float(loss.detach())  # with gradient accumulation, an earlier batch may be the cause
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    text = _describe_nonfinite(gradients, "the gradients of ")
    if text and not math.isfinite(value):
        text = f"a loss of {value} and {text}"

    if found := _describe_ranks(channel, text, group_size):
        raise AgreedError(
            f"Gradients are not finite before step {step}: {found}. All ranks are stopping; no"
            " parameter was changed. Inspect the batches of the tensor groups listed, or lower the"
            " learning rate, then resume from the last checkpoint."
        )


def refuse_nonfinite_weights(
    channel: Channel, module: nn.Module, steps: int, group_size: int
) -> None:
    """Raise the same `RuntimeError` on all ranks if any has nonfinite weights; collective.

    Call this function before saving a checkpoint.
    """
    weights = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    text = "" if _norm_is_finite(list(weights.values())) else _describe_nonfinite(weights, "")

    if found := _describe_ranks(channel, text, group_size):
        raise RuntimeError(
            f"Weights are not finite after step {steps}: {found}. No checkpoint was written;"
            " earlier ones are unchanged. The gradients were finite after backward: check hooks"
            " that change gradients or weights, and the learning rate."
        )


def _norm_is_finite(tensors: list[Tensor]) -> bool:
    return not tensors or bool(torch.nn.utils.get_total_norm(tensors).isfinite())


def _describe_ranks(channel: Channel, finding: str, group_size: int) -> str:
    """Gather all ranks' findings; describe those that are not empty, else return ""; collective."""
    affected = [
        f"rank {rank} (tensor group {rank // group_size}) has {found}"
        for rank, found in zip(channel.ranks, gather_texts(channel, finding), strict=True)
        if found
    ]
    more = f"; and {len(affected) - _NAMED} more ranks" if len(affected) > _NAMED else ""
    return "; ".join(affected[:_NAMED]) + more


def _describe_nonfinite(tensors: Mapping[str, Tensor], prefix: str) -> str:
    """Name a tensor that is not finite and count the others, or return ""."""
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if not bad:
        return ""

    kind = "NaN" if bool(tensors[bad[0]].isnan().any()) else "Inf"
    rest = f" and {len(bad) - 1} more of {len(tensors)}" if len(bad) > 1 else ""
    return f"{kind} in {prefix}{bad[0]!r}{rest}"
