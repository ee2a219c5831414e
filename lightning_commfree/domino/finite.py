"""NaN and Inf in gradients are found before the optimizer step, on all ranks at once.

A part of a divided weight is one rank's alone, and the mean over the data axis hides who spoiled
it. So each rank looks at its own gradients ahead of that mean, in one pass over them: their
Euclidean norm is finite where they are. A norm that is not may also be one that has overflowed;
only then single numbers are looked at, and names exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import gather_texts

_NAMED = 3


def looks_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether the norm of this rank's gradients is finite; waits for the device once."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return bool(torch.nn.utils.get_total_norm(gradients).isfinite()) if gradients else True


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
    found = gather_texts(channel, _describe(module, loss))
    guilty = [
        f"rank {rank} (tensor group {rank // group_size}) has {text}"
        for rank, text in zip(channel.ranks, found, strict=True)
        if text
    ]
    if guilty:
        more = f"; and {len(guilty) - _NAMED} more ranks" if len(guilty) > _NAMED else ""
        raise RuntimeError(
            f"Gradients are not finite, before step {step}: {'; '.join(guilty[:_NAMED])}{more}. All"
            " ranks stop; no parameter was changed. Look at that tensor group's batch, or lower the"
            " learning rate, and go on from the last checkpoint."
        )


def _describe(module: nn.Module, loss: Tensor) -> str:
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if not bad:
        return ""
    kind = "NaN" if bool(gradients[bad[0]].isnan().any()) else "Inf"
    rest = f" and {len(bad) - 1} more of {len(gradients)}" if len(bad) > 1 else ""
    value = float(loss.detach())  # of the latest batch: of accumulated ones another may be to blame
    spoilt = "" if math.isfinite(value) else f"a loss of {value} and "
    return f"{spoilt}{kind} in the gradients of {bad[0]!r}{rest}"
