"""Gradients across ranks: data-parallel mean, shared shards, norm, and checks for NaN and Inf.

- `GradientAverage` averages them over the data axis, sublayer by sublayer, during backward.
- Several ranks of a tensor group may hold one key head: `sum_shared` adds up their gradients.
- `gradient_norm` counts every element of the full gradient once.

NaN and Inf are found before the optimizer step, on all ranks at once. A shard belongs to one rank,
and the mean over the data axis would hide which replica spoiled it, so each rank checks its own
gradients before the mean. Their Euclidean norm takes one pass, and is finite only if they are. It
may also overflow, so if it is not finite the ranks check single elements and exchange names.

Hooks may spoil gradients after that, and an optimizer may spoil weights: a check before each
checkpoint finds both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.handshake import gather_texts
from lightning_commfree.comm.liveness import AgreedError
from lightning_commfree.domino.layers import TensorGroup
from lightning_commfree.domino.sharding import ShardSpec
from lightning_commfree.domino.sublayers import Sublayer

AVERAGE_TAG = "data_gradient"
SHARED_TAG = "tensor_shared"
NORM_TAG = "tensor_norm"

# parameters, their gradients at launch, and the all-reduce of those in one flat tensor
Flying = tuple[list[nn.Parameter], list[Tensor], Pending[Tensor]]


class GradientAverage:
    """Average gradients over the data axis during backward.

    Args:
        channel: to the ranks with the same shard of the model.

    Attributes:
        active: whether this backward is the last one before an optimizer step.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.active = True
        self._flying: list[Flying] = []
        self._launched: dict[nn.Parameter, tuple[Tensor, int]] = {}  # gradient, version

    def sublayer_is_done(self, sublayer: Sublayer) -> None:
        """Launch the gradients of a sublayer's parameters, which are complete."""
        if self.active and self._channel.size > 1:  # accumulated gradients are sent once
            self._launch([p for module in sublayer.modules for p in module.parameters()])

    def land(self, parameters: Iterable[nn.Parameter]) -> None:
        """Launch the remaining gradients of `parameters`, wait, and store all means in place."""
        if self._channel.size == 1:
            return

        # After two forwards and one backward, the first run of the blocks completes a sublayer and
        # launches its gradients, and the second run adds to them. These are late: they changed
        # after their launch, and are launched again.
        late = {
            p
            for p, (gradient, version) in self._launched.items()
            if p.grad is not gradient or gradient._version != version
        }
        for p in late:
            del self._launched[p]

        early, self._flying = self._flying, []
        self._launch(parameters)
        again, self._flying = self._flying, []
        self._launched.clear()

        self._put(early, late)
        self._put(again, set())

    def _put(self, flying: Sequence[Flying], late: set[nn.Parameter]) -> None:
        for parameters, gradients, pending in flying:
            mean = pending.wait().div_(self._channel.size)
            parts = torch.split(mean, [gradient.numel() for gradient in gradients])
            for p, gradient, part in zip(parameters, gradients, parts, strict=True):
                if p not in late:
                    gradient.copy_(part.view(gradient.shape))

    def _launch(self, parameters: Iterable[nn.Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in parameters:
            if p.grad is not None and p not in self._launched:
                self._launched[p] = (p.grad, p.grad._version)
                by_dtype.setdefault(p.grad.dtype, []).append(p)

        # one flat message a dtype: many small all-reduces would cost their latency each
        for members in by_dtype.values():
            gradients = [self._launched[p][0] for p in members]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            # the data axis may be a CPU channel over the slow link
            flying = self._channel.all_reduce(flat.to(self._channel.device), AVERAGE_TAG)
            self._flying.append((members, gradients, flying))


def sum_shared(specs: Mapping[nn.Parameter, ShardSpec], group: TensorGroup) -> None:
    """Add up the gradients of shards that several ranks of a tensor group hold; collective.

    Only the ranks with the same shard may add to it, but they have no channel of their own: each
    places its gradient in zeros of the full shape.
    """
    for parameter, spec in specs.items():
        if spec.overlapping and parameter.grad is not None:
            shape = list(parameter.shape)
            shape[spec.dim] = spec.size
            start, stop = spec.ranges[group.rank]

            whole = parameter.grad.new_zeros(shape)
            whole.narrow(spec.dim, start, stop - start).copy_(parameter.grad)
            group.all_reduce(whole, SHARED_TAG).wait()
            parameter.grad.copy_(whole.narrow(spec.dim, start, stop - start))


def gradient_norm(
    parameters: Iterable[nn.Parameter], specs: Mapping[nn.Parameter, ShardSpec], group: TensorGroup
) -> Tensor:
    """Return the Euclidean norm of the whole model's gradient; collective.

    Args:
        parameters: of this rank.
        specs: of the sharded ones.
        group: the tensor group.

    Returns:
        A scalar tensor, in float32 or wider; the same on all ranks.
    """
    total: dict[bool, Tensor] = {}  # by whether the parameters are sharded
    for p in parameters:
        if p.grad is None:
            continue

        spec = specs.get(p)
        holders = 1 if spec is None else spec.ranges.count(spec.ranges[group.rank])
        # a copy counts 1 / holders on each of its holders
        square = (
            p.grad.detach().to(torch.promote_types(p.grad.dtype, torch.float32)).square().sum()
            / holders
        )
        key = spec is not None
        total[key] = total[key] + square if key in total else square

    if not total:  # the same on all ranks, which have the same parameters
        return torch.zeros(())
    first = next(iter(total.values()))
    divided = total.get(True, torch.zeros_like(first)).reshape(1)
    whole = total.get(False, torch.zeros_like(first))
    return (group.all_reduce(divided, NORM_TAG).wait().squeeze(0) + whole).sqrt()


_NAMED = 3


def looks_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the norm of this rank's gradients is finite; waits for the device once."""
    return _norm_is_finite([p.grad for p in parameters if p.grad is not None])


def refuse_nonfinite(
    channel: Channel, module: nn.Module, loss: Tensor, step: int, group_size: int
) -> None:
    """Raise an error that names the ranks whose gradients are not finite; collective.

    Called after some rank's norm was not finite.

    Args:
        channel: to all ranks of the fit.
        module: with this rank's gradients, not averaged yet.
        loss: of this rank's latest batch, one element.
        step: the next one, counted from 1.
        group_size: consecutive ranks that share a model.

    Raises:
        RuntimeError: some rank has NaN or Inf; the same on all ranks.
    """
    value = float(loss.detach())  # of accumulated batches, another one may be the cause
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    text = _describe(gradients, "the gradients of ")
    if text and not math.isfinite(value):
        text = f"a loss of {value} and {text}"

    if found := _named(channel, text, group_size):
        raise AgreedError(
            f"Gradients are not finite, before step {step}: {found}. All ranks stop; no parameter"
            " was changed. Check that tensor group's batch, or lower the learning rate, and resume"
            " from the last checkpoint."
        )


def refuse_nonfinite_weights(
    channel: Channel, module: nn.Module, steps: int, group_size: int
) -> None:
    """Check that trained weights are finite, before a checkpoint; collective.

    Args:
        channel: to all ranks of the fit.
        module: with this rank's shards.
        steps: taken so far.
        group_size: consecutive ranks that share a model.

    Raises:
        RuntimeError: some rank has NaN or Inf; the same on all ranks.
    """
    weights = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    text = "" if _norm_is_finite(list(weights.values())) else _describe(weights, "")

    if found := _named(channel, text, group_size):
        raise RuntimeError(
            f"Weights are not finite, after step {steps}: {found}. No checkpoint is written, and"
            " earlier ones are unchanged. The gradients were finite after backward: check hooks"
            " that change gradients or weights, and the learning rate."
        )


def _norm_is_finite(tensors: list[Tensor]) -> bool:
    return not tensors or bool(torch.nn.utils.get_total_norm(tensors).isfinite())


def _named(channel: Channel, text: str, group_size: int) -> str:
    """Return a list of the ranks that give a text, with the text; empty if none does."""
    guilty = [
        f"rank {rank} (tensor group {rank // group_size}) has {said}"
        for rank, said in zip(channel.ranks, gather_texts(channel, text), strict=True)
        if said
    ]
    more = f"; and {len(guilty) - _NAMED} more ranks" if len(guilty) > _NAMED else ""
    return "; ".join(guilty[:_NAMED]) + more


def _describe(tensors: Mapping[str, Tensor], of: str) -> str:
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if not bad:
        return ""

    kind = "NaN" if bool(tensors[bad[0]].isnan().any()) else "Inf"
    rest = f" and {len(bad) - 1} more of {len(tensors)}" if len(bad) > 1 else ""
    return f"{kind} in {of}{bad[0]!r}{rest}"
