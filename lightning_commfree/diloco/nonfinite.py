"""Handle replicas with NaN or Inf: detect them at launch, exclude their values, repair them.

A replica that continues after a NaN stays NaN, and its outer gradient would spread it to all
others. So every message tells whether its values are finite (`is_nonfinite`), and at the landing
all ranks know the replicas whose values are not. With `nonfinite="raise"` all ranks stop
(`refuse_landing`). With "abstain":

1. The mean is taken over the other replicas; if there are none, all ranks stop.
2. The abstaining replica replaces its local copy of the fragment by the global copy, whatever `mix`
   is. It does so for every other fragment whose local copy is not finite too: otherwise its next
   step would make all of them NaN again. This includes the fragments' averaged buffers.
3. It resets the inner optimizer's state of these parameters where that is not finite
   (`reset_nonfinite_state`).
4. In the last round of a fit, the others' mean of the local weights replaces its local weights.

Non-persistent buffers are never exchanged and stay as they are.
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
from lightning_commfree.model.shards import local_tensor

LARGEST = 2.0**119  # the limit of the narrowest wire formats
NONFINITE_VALUES = f"NaN, Inf or more than {LARGEST:.1g}"


def refuse_landing(
    arrival: Arrival,
    p: int,
    names: Sequence[str],
    step: int,
    members: Sequence[int],
    settings: DiLoCoSettings,
) -> None:
    """Check that fragment `p` may land after inner step `step`; same result on all replicas.

    `names` are its parameters, and `members` the ids of the replicas that exchanged it.

    Raises:
        RuntimeError: the replicas launched it after different steps, their global copies differ,
            they thawed different parameters, or a replica's values are not finite.
    """
    if arrival.steps_differ:
        raise RuntimeError(
            f"The replicas are out of step: their messages for fragment {p}, applied after step"
            f" {step}, were sent at different inner steps. Give every replica the same number of"
            " batches, and resume all of them from the same checkpoint."
        )
    if arrival.joined_differ:
        raise RuntimeError(
            "The replicas have thawed different parameters, or the same ones at different steps;"
            f" this was detected when fragment {p} was applied after inner step {step}. Set"
            " `requires_grad` on the same parameters at the same step on all ranks."
        )
    if arrival.drifted:
        raise RuntimeError(
            f"The replicas' global copies of fragment {p} differ (detected when it was applied"
            f" after inner step {step}): {', '.join(names)}. They were equal when the fit began, so"
            " something other than the strategy has changed them, or a replica computes wrong"
            " values. Resume from an earlier checkpoint."
        )
    if arrival.nonfinite:
        _refuse_nonfinite(arrival.nonfinite, p, step, members, settings)


def _refuse_nonfinite(
    nonfinite: Sequence[int], p: int, step: int, members: Sequence[int], settings: DiLoCoSettings
) -> None:
    """Raise if any replica's values are non-finite; with "abstain", only if every replica's are."""
    abstains = settings.nonfinite == "abstain"
    if abstains and len(nonfinite) < len(members):
        return

    size = settings.replica_size
    sick = [members[m] for m in nonfinite]
    named = ", ".join(f"replica {m} ({_ranks_of(m, size)})" for m in sick)
    hint = (
        "No replica with finite weights is left: resume from an earlier checkpoint."
        if abstains
        else "Lower the learning rate or check that replica's batches; with `nonfinite='abstain'`"
        " it would be left out of the mean and continue from the global copy."
    )
    raise AgreedError(
        f"The outer gradient of fragment {p} from {named} is not finite ({NONFINITE_VALUES})."
        f" It was due to be applied after inner step {step}; all ranks are stopping before applying"
        f" it. {hint}"
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
    """Check that the weights of a checkpoint are finite, before anything is written.

    Collective over `world`; nothing may be in flight. `local` is the local copy, as
    `WeightSwap.local` returns it. With the rule "abstain" only the global copies are checked: a
    replica continues from them, in a resumed fit too.

    Raises:
        RuntimeError: some rank's weights are not finite; raised on all ranks.
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
            f" {', '.join(faults)}. All ranks are stopping, and no checkpoint is written: the"
            " previous one is the last good one. Lower the learning rate or check that rank's"
            " batches."
        )


def take_global(fragments: Sequence[OuterFragment], p: int, within: Channel | None) -> list[int]:
    """Replace the local copies of fragment `p` and of all nonfinite ones by the global copies.

    Collective within the replica.

    Returns:
        The indices of these fragments.
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

    Fragment `p` has landed after inner step `step`. The fragments in `taken`, with these
    `parameters`, were reset to their global copies.
    """
    reset_nonfinite_state(optimizers, parameters)
    warnings.warn(
        f"This replica was left out of the mean of fragment {p}, which landed after inner step"
        f" {step}, because its values were not finite ({NONFINITE_VALUES}). It continues from the"
        f" global copy of fragments {', '.join(map(str, taken))}; the inner optimizer's state of"
        " their parameters was reset where it was not finite.",
        stacklevel=2,
    )


def reset_nonfinite_state(
    optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]
) -> None:
    """Reset the inner optimizers' state of some parameters where it is not finite.

    The state is deleted, so the next step is like a parameter's first one. Adagrad creates its
    state only in the constructor, so there its tensors are set to zero.
    """
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            state = optimizer.state.get(parameter, {})
            tensors = [local_tensor(t) for t in state.values() if isinstance(t, Tensor)]
            tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
            if all(bool(tensor.isfinite().all()) for tensor in tensors):
                continue

            if isinstance(optimizer, torch.optim.Adagrad):
                for tensor in tensors:
                    tensor.zero_()
            else:
                del optimizer.state[parameter]


def is_nonfinite(fragment: OuterFragment, values: Tensor, within: Channel | None = None) -> Tensor:
    """Return whether values of a fragment contain NaN, Inf or more than a wire format can carry.

    In a buffer, values count only where the global copy is finite: a mask may contain -inf.

    Args:
        fragment: the fragment.
        values: values of the fragment, from `OuterFragment.outer_gradient`.
        within: channel to the ranks with the other shards: the result then covers all shards.
            Collective.

    Returns:
        bool, 0-d, on the device of `values`; the host does not wait for it.
    """
    parameters, buffers = values[: fragment.parameter_numel], values[fragment.parameter_numel :]
    found = torch.zeros((), dtype=torch.bool, device=values.device)
    if parameters.numel():
        low, high = torch.aminmax(
            parameters
        )  # with a NaN both are NaN, and every comparison is False
        found = ~((low > -LARGEST) & (high < LARGEST))
    if buffers.numel():
        outer = fragment.global_copy[fragment.parameter_numel :]
        outer = outer.to(values.device, non_blocking=True)
        found = found | (outer.isfinite() & ~buffers.isfinite()).any()

    if within is None or within.size == 1:
        return found
    shards = within.all_reduce(found.float().to(within.device), WITHIN_TAG).wait()
    return (shards > 0).to(values.device)
