"""A replica with NaN or Inf: seen where its values leave, kept from the others, made good again.

A replica that goes on from NaN stays NaN, and its outer gradient would make all the others so. With
every launch travels whether its values are finite (`is_nonfinite`); at the landing all ranks know
alike whose are not, and with `nonfinite="raise"` all stop. With "abstain":

1. The mean is over the other replicas; where no other is left, all stop.
2. The replica that abstained takes the global copy of that fragment, whatever `mix` is, and of
   every other fragment of which its local copy is not finite then: else its next step would make
   all of them NaN again. Averaged buffers of a fragment count and go with it.
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
from lightning_commfree.diloco.outer import REPLICA_TAG, OuterFragment

TAG = "finite"
_LARGEST = 2.0**119  # the narrowest wire formats carry no more
_NAMED = f"NaN, Inf or more than {_LARGEST:.1g}"


def is_nonfinite(fragment: OuterFragment, values: Tensor, replica: Channel | None = None) -> Tensor:
    """Return whether values of a fragment hold NaN, Inf or more than any wire format carries.

    A buffer's constants count only where the global copy is finite: a mask may hold -inf.

    Args:
        fragment: whose values they are.
        values: as `OuterFragment.outer_gradient` returns them.
        replica: to the ranks that hold the other shards; they are told of this one. Collective.

    Returns:
        bool, no dimension, on the device of `values`, where nobody waits for it.
    """
    parameters, buffers = values[: fragment.parameter_numel], values[fragment.parameter_numel :]
    found = torch.zeros((), dtype=torch.bool, device=values.device)
    if parameters.numel():
        low, high = torch.aminmax(parameters)  # a NaN is both, and no comparison holds for it
        found = ~((low > -_LARGEST) & (high < _LARGEST))
    if buffers.numel():
        outer = fragment.global_copy[fragment.parameter_numel :]
        outer = outer.to(values.device, non_blocking=True)
        found = found | (outer.isfinite() & ~buffers.isfinite()).any()
    if replica is None or replica.size == 1:
        return found
    shards = replica.all_reduce(found.float().to(replica.device), REPLICA_TAG).wait()
    return (shards > 0).to(values.device)


def refuse_nonfinite(
    nonfinite: Sequence[int], rule: str, p: int, step: int, channel: Channel, replica_size: int
) -> None:
    """Stop, at a landing, where the rule says so; on all ranks alike.

    Args:
        nonfinite: replicas of which an arrival says so.
        rule: the setting, "raise" or "abstain".
        p: the fragment.
        step: the inner step after which it lands.
        channel: to the other replicas.
        replica_size: ranks of a replica.

    Raises:
        RuntimeError: a replica's values are not finite; with "abstain", no replica's are.
    """
    if not nonfinite or (rule == "abstain" and len(nonfinite) < channel.size):
        return
    named = ", ".join(f"replica {m} ({_ranks_of(m, replica_size)})" for m in nonfinite)
    hint = (
        "No replica is left whose weights are finite: resume from a checkpoint before it."
        if rule == "abstain"
        else "Lower the learning rate or look at that replica's batches; `nonfinite='abstain'`"
        " would leave it out and let it go on from the global copy."
    )
    raise RuntimeError(
        f"What {named} sent of fragment {p} is not finite ({_NAMED}); it was to land after inner"
        f" step {step}. All ranks stop; it has landed nowhere. {hint}"
    )


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
            f"The weights are not finite ({_NAMED}) after inner step {step} on {', '.join(faults)}."
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
        step: the inner step after which.
        taken: numbers of the fragments that it has taken.
    """
    reset_nonfinite_state(optimizers, parameters)
    warnings.warn(
        f"This replica's values of fragment {p} were not finite ({_NAMED}) and did not count when"
        f" it landed, after inner step {step}. It goes on from the global copy of fragments"
        f" {', '.join(map(str, taken))}; where the inner optimizer's state of them was not finite,"
        " it begins anew.",
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
            tensors = [t for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()]
            if all(bool(tensor.isfinite().all()) for tensor in tensors):
                continue
            if isinstance(optimizer, torch.optim.Adagrad):
                for tensor in tensors:
                    tensor.zero_()
            else:
                del optimizer.state[parameter]


def _ranks_of(replica: int, size: int) -> str:
    first = replica * size
    return f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}"
