"""A replica with NaN or Inf: seen where its values leave, kept from the others, made good again.

A replica that goes on from NaN stays NaN, and its outer gradient would make all the others so. With
every launch travels whether its values are finite (`transfers.is_nonfinite`). At the landing all
ranks know alike which replicas' values are not. With `nonfinite="raise"` all stop (`refusals`).
With "abstain":

1. The mean is over the other replicas; where no other is left, all stop.
2. The replica that abstained takes the global copy of that fragment, whatever `mix` is. It also
   takes the global copy of every other fragment that is not finite in its local copy: else its next
   step would make all of them NaN again. Averaged buffers of a fragment count and go with it.
3. Its inner optimizer forgets the state of those of these parameters for which it is not finite
   (`reset_nonfinite_state`).
4. In the last round of a fit the mean of the local weights is over the others, and it takes it.

What no exchange knows stays as it is: buffers that are not part of a checkpoint, other fragments.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.parts import own
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.refusals import NONFINITE_VALUES
from lightning_commfree.diloco.transfers import is_nonfinite

TAG = "finite"


def refuse_to_save(
    fragments: Sequence[OuterFragment],
    local: Iterable[Tensor],
    rule: str,
    step: int,
    world: Channel,
) -> None:
    """See, before anything is written, that what a checkpoint would hold is finite.

    Collective over the world; nothing is in flight. With "abstain" a local copy may be what it is:
    the replica will go on from the global one, in a resumed fit too.

    Args:
        fragments: all of the model.
        local: the local copy, as `WeightSwap.local` returns it.
        rule: the setting, "raise" or "abstain".
        step: inner steps done.
        world: channel over all ranks.

    Raises:
        RuntimeError: somebody's weights are not; on all ranks alike.
    """
    tensors, found = iter(local), []
    for fragment in fragments:
        own = list(islice(tensors, len(fragment.local)))
        values = fragment.outer_gradient(own) if rule == "raise" else fragment.global_copy
        found.append(bool(is_nonfinite(fragment, values)))

    mine = torch.tensor([found.index(True) if any(found) else -1], device=world.device)
    everybody = enumerate(world.all_gather(mine, TAG).wait().flatten().tolist())
    faults = [f"rank {rank}: fragment {p}" for rank, p in everybody if p >= 0]
    if faults:
        raise RuntimeError(
            f"The weights are not finite ({NONFINITE_VALUES}) after inner step {step} on"
            f" {', '.join(faults)}."
            " All ranks stop, and no checkpoint is written: one before it is the last good one."
            " Lower the learning rate or look at that rank's batches."
        )


def take_global(fragments: Sequence[OuterFragment], p: int, replica: Channel | None) -> list[int]:
    """Let the local copy of fragment `p`, and of all others that are not finite, be the global one.

    Collective over the replica.

    Returns:
        Which they were.
    """
    found = [is_nonfinite(fragment, fragment.outer_gradient(), replica) for fragment in fragments]
    taken = [q for q, flag in enumerate(found) if flag or q == p]
    for q in taken:
        fragments[q].merge(mix=0.0)
    return taken


def restart_from_global(
    optimizers: Iterable[Optimizer],
    parameters: Iterable[nn.Parameter],
    p: int,
    step: int,
    taken: Sequence[int],
) -> None:
    """Let a replica that has abstained go on: `reset_nonfinite_state`, and a warning on its ranks.

    Args:
        optimizers: the inner ones.
        parameters: of the fragments that it has taken.
        p: the fragment that has landed.
        step: the inner step after which it has.
        taken: numbers of the fragments that it has taken.
    """
    reset_nonfinite_state(optimizers, parameters)
    warnings.warn(
        f"This replica's values of fragment {p} were not finite ({NONFINITE_VALUES}) and did not"
        f" count when it landed, after inner step {step}. It goes on from the global copy of"
        f" fragments {', '.join(map(str, taken))}; where the inner optimizer's state of them was"
        " not finite, it begins anew.",
        stacklevel=2,
    )


def reset_nonfinite_state(
    optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]
) -> None:
    """Reset the inner optimizers' state of those parameters for which it is not finite.

    It is dropped, so that the next step is as a parameter's first one; where the optimizer cannot
    make it anew (Adagrad has made it in its constructor), its tensors become zero.
    """
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            state = optimizer.state.get(parameter, {})
            tensors = [own(t) for t in state.values() if isinstance(t, Tensor)]
            tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
            if all(bool(tensor.isfinite().all()) for tensor in tensors):
                continue

            if isinstance(optimizer, torch.optim.Adagrad):
                for tensor in tensors:
                    tensor.zero_()
            else:
                del optimizer.state[parameter]
