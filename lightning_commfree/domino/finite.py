"""NaN and Inf in gradients are found before the optimizer step, on all ranks at once.

A part of a divided weight is one rank's alone, and the mean over the data axis hides who spoiled
it. So each rank looks at its own gradients before that mean. One pass is enough: where they are
finite, their Euclidean norm is. A norm can also overflow, so the ranks look at single numbers next,
and exchange names.

Hooks may spoil gradients after that, and an optimizer weights: a check before each checkpoint finds
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import gather_texts

_NAMED = 3


def looks_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the norm of this rank's gradients is finite; waits for the device once."""
    return _norm_is_finite([p.grad for p in parameters if p.grad is not None])


def refuse_nonfinite(
    channel: Channel, module: nn.Module, loss: Tensor, step: int, group_size: int
) -> None:
    """Find out on which ranks gradients are not finite; collective, after a suspicion.

    Args:
        channel: to all ranks of the fit.
        module: with this rank's gradients, not averaged yet.
        loss: of this rank's latest batch, of one element.
        step: that would come next, counted from 1.
        group_size: consecutive ranks that share a model.

    Raises:
        RuntimeError: some rank has NaN or Inf; on all of them alike.
    """
    value = float(loss.detach())  # of the latest batch: of accumulated ones another may be to blame
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    text = _describe(gradients, "the gradients of ")
    if text and not math.isfinite(value):
        text = f"a loss of {value} and {text}"

    if found := _named(channel, text, group_size):
        raise RuntimeError(
            f"Gradients are not finite, before step {step}: {found}. All ranks stop; no parameter"
            " was changed. Look at that tensor group's batch, or lower the learning rate, and go on"
            " from the last checkpoint."
        )


def refuse_nonfinite_weights(
    channel: Channel, module: nn.Module, steps: int, group_size: int
) -> None:
    """See that trained weights are finite, before a checkpoint; collective.

    Args:
        channel: to all ranks of the fit.
        module: with this rank's parts.
        steps: that have been taken.
        group_size: consecutive ranks that share a model.

    Raises:
        RuntimeError: some rank has NaN or Inf; on all of them alike.
    """
    weights = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    text = "" if _norm_is_finite(list(weights.values())) else _describe(weights, "")

    if found := _named(channel, text, group_size):
        raise RuntimeError(
            f"Weights are not finite, after step {steps}: {found}. No checkpoint is written, and"
            " earlier ones are as they were. The gradients were finite behind backward: look at"
            " hooks that change them, or weights, and at the learning rate."
        )


def _norm_is_finite(tensors: list[Tensor]) -> bool:
    return not tensors or bool(torch.nn.utils.get_total_norm(tensors).isfinite())


def _named(channel: Channel, text: str, group_size: int) -> str:
    """Return who has said something, and what; empty if nobody has."""
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
