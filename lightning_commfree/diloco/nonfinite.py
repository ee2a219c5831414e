"""Replicas with NaN or Inf: detected when a fragment leaves, kept from the others, and repaired.

A replica that trains on after a NaN stays NaN, and its outer gradient would make all the others so.
Every launch therefore says whether its values are finite (`is_nonfinite`); at the landing all ranks
know which replicas' values are not. With `nonfinite="raise"` all ranks stop (`refuse_landing`).
With "abstain":

1. The mean is over the other replicas; if no other is left, all stop.
2. The replica that abstained takes the global copy of that fragment, whatever `mix` is. It also
   takes the global copy of every other fragment whose local copy is not finite: otherwise its next
   step would make all of them NaN again. Averaged buffers of a fragment are included.
3. Its inner optimizer resets the state of the parameters in them for which it is not finite
   (`reset_nonfinite_state`).
4. In the last round of a fit the mean of the local weights is over the others, and it takes it.

Buffers that are not in a checkpoint are never exchanged and stay as they are.
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
from lightning_commfree.diloco.outer import WITHIN_TAG, OuterFragment
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.model.shards import own

LARGEST = 2.0**119  # the narrowest wire formats carry no more
NONFINITE_VALUES = f"NaN, Inf or more than {LARGEST:.1g}"


def refuse_landing(
    arrival: Arrival,
    p: int,
    names: Sequence[str],
    step: int,
    members: Sequence[int],
    settings: DiLoCoSettings,
) -> None:
    """Check that a received fragment may land; all replicas come to the same result.

    Args:
        arrival: what all replicas sent.
        p: the fragment.
        names: of its parameters.
        step: the inner step after which it lands.
        members: ids of the replicas that exchanged it.
        settings: of the fit.

    Raises:
        RuntimeError: it was launched after different steps, the global copies differ, different
            parameters were thawed, or a replica's values are not finite.
    """
    if arrival.steps_differ:
        raise RuntimeError(
            f"The replicas are at different inner steps: the messages of fragment {p} that"
            f" landed after step {step} left after different ones. Every replica must see"
            " as many batches, and resume from the same checkpoint."
        )
    if arrival.joined_differ:
        raise RuntimeError(
            f"The replicas have thawed different parameters, or the same ones at different steps:"
            f" found when fragment {p} landed after inner step {step}. Set `requires_grad` on the"
            " same parameters at the same step of all ranks."
        )
    if arrival.drifted:
        raise RuntimeError(
            f"The replicas' global copies of fragment {p} differ, which landed after inner step"
            f" {step}: {', '.join(names)}. They were equal when the fit began, so"
            " something but the strategy has changed them, or a replica computes wrongly."
            " Resume from a checkpoint before it."
        )
    if arrival.nonfinite:
        _refuse_nonfinite(arrival.nonfinite, p, step, members, settings)


def _refuse_nonfinite(
    nonfinite: Sequence[int], p: int, step: int, members: Sequence[int], settings: DiLoCoSettings
) -> None:
    """Stop if a replica's values are not finite; with "abstain", if no replica's are."""
    abstains = settings.nonfinite == "abstain"
    if abstains and len(nonfinite) < len(members):
        return

    size = settings.replica_size
    sick = [members[m] for m in nonfinite]
    named = ", ".join(f"replica {m} ({_ranks_of(m, size)})" for m in sick)
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
    """Check, before anything is written, that the weights of a checkpoint are finite.

    Collective over the world; nothing is in flight. With "abstain" only the global copies must be:
    the replica will continue from them, in a resumed fit too.

    Args:
        fragments: all of the model.
        local: the local copy, as `WeightSwap.local` returns it.
        rule: the setting, "raise" or "abstain".
        step: inner steps done.
        world: channel over all ranks.

    Raises:
        RuntimeError: some rank's weights are not; on all ranks.
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


def take_global(fragments: Sequence[OuterFragment], p: int, within: Channel | None) -> list[int]:
    """Replace the local copies of fragment `p` and of all that are not finite by the global ones.

    Collective within the replica.

    Returns:
        The numbers of these fragments.
    """
    found = [is_nonfinite(fragment, fragment.outer_gradient(), within) for fragment in fragments]
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
    """Reset the inner optimizers of a replica that has abstained, and warn on its ranks.

    Args:
        optimizers: the inner ones.
        parameters: of the fragments in `taken`.
        p: the fragment that has landed.
        step: the inner step after which it has.
        taken: fragments whose global copies the replica has taken.
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

    It is dropped, so the next step is like a parameter's first. Adagrad makes its state in the
    constructor only: there the tensors become zero.
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


def is_nonfinite(fragment: OuterFragment, values: Tensor, within: Channel | None = None) -> Tensor:
    """Return whether values of a fragment hold NaN, Inf or more than any wire format carries.

    A buffer's constants count only where the global copy is finite: a mask may hold -inf.

    Args:
        fragment: the fragment.
        values: as `OuterFragment.outer_gradient` returns them.
        within: channel to the ranks that hold the other shards: the result is of all shards.
            Collective.

    Returns:
        bool, no dimension, on the device of `values`; the host does not wait for it.
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

    if within is None or within.size == 1:
        return found
    shards = within.all_reduce(found.float().to(within.device), WITHIN_TAG).wait()
    return (shards > 0).to(values.device)
