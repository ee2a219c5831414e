"""A replica with NaN or Inf: seen where its values leave, kept from the others, made good again.

A replica that goes on from NaN stays NaN, and its outer gradient would make all the others so. With
every launch travels whether its values are finite (`is_nonfinite`). At the landing all
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

What ends a fit on all ranks: what all replicas sent of a fragment must not land.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.liveness import AgreedError
from lightning_commfree.diloco.exchange import Arrival
from lightning_commfree.diloco.outer import REPLICA_TAG, OuterFragment
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.model.shards import own

LARGEST = 2.0**119  # the narrowest wire formats carry no more
NONFINITE_VALUES = f"NaN, Inf or more than {LARGEST:.1g}"


def refuse_landing(
    arrival: Arrival,
    p: int,
    names: Sequence[str],
    step: int,
    channel: Channel,
    settings: DiLoCoSettings,
) -> None:
    """See that what all replicas sent of a fragment may land; the same on all of them.

    Args:
        arrival: what they sent.
        p: the fragment.
        names: of its parameters.
        step: the inner step after which it lands.
        channel: to the other replicas.
        settings: of the fit.

    Raises:
        RuntimeError: it left after different steps, the global copies differ, or a replica's values
            are not finite.
    """
    if arrival.steps_differ:
        raise RuntimeError(
            f"The replicas are at different inner steps: the messages of fragment {p} that"
            f" landed after step {step} left after different ones. Every replica must see"
            " as many batches, and resume from the same checkpoint."
        )
    if arrival.drifted:
        raise RuntimeError(
            f"The replicas' global copies of fragment {p} differ, which landed after inner step"
            f" {step}: {', '.join(names)}. They were equal when the fit began, so"
            " something but the strategy has changed them, or a replica computes wrongly."
            " Resume from a checkpoint before it."
        )
    if arrival.nonfinite:
        _refuse_nonfinite(arrival.nonfinite, p, step, channel.size, settings)


def _refuse_nonfinite(
    nonfinite: Sequence[int], p: int, step: int, num_replicas: int, settings: DiLoCoSettings
) -> None:
    """Stop where a replica's values are not finite; with "abstain", where no replica's are."""
    abstains = settings.nonfinite == "abstain"
    if abstains and len(nonfinite) < num_replicas:
        return

    size = settings.replica_size
    named = ", ".join(f"replica {m} ({_ranks_of(m, size)})" for m in nonfinite)
    hint = (
        "No replica is left whose weights are finite: resume from a checkpoint before it."
        if abstains
        else "Lower the learning rate or look at that replica's batches; `nonfinite='abstain'`"
        " would leave it out and let it go on from the global copy."
    )
    raise AgreedError(
        f"What {named} sent of fragment {p} is not finite ({NONFINITE_VALUES}); it was to land"
        f" after inner step {step}. All ranks stop; it has landed nowhere. {hint}"
    )


def _ranks_of(replica: int, size: int) -> str:
    first = replica * size
    return f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}"


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
        raise AgreedError(
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


def is_nonfinite(fragment: OuterFragment, values: Tensor, replica: Channel | None = None) -> Tensor:
    """Return whether values of a fragment hold NaN, Inf or more than any wire format carries.

    A buffer's constants count only where the global copy is finite: a mask may hold -inf.

    Args:
        fragment: that has the values.
        values: as `OuterFragment.outer_gradient` returns them.
        replica: to the ranks that hold the other shards; they are told of this one. Collective.

    Returns:
        bool, no dimension, on the device of `values`, where nobody waits for it.
    """
    parameters, buffers = values[: fragment.parameter_numel], values[fragment.parameter_numel :]
    found = torch.zeros((), dtype=torch.bool, device=values.device)
    if parameters.numel():
        low, high = torch.aminmax(parameters)  # a NaN is both, and no comparison holds for it
        found = ~((low > -LARGEST) & (high < LARGEST))
    if buffers.numel():
        outer = fragment.global_copy[fragment.parameter_numel :]
        outer = outer.to(values.device, non_blocking=True)
        found = found | (outer.isfinite() & ~buffers.isfinite()).any()

    if replica is None or replica.size == 1:
        return found
    shards = replica.all_reduce(found.float().to(replica.device), REPLICA_TAG).wait()
    return (shards > 0).to(values.device)
