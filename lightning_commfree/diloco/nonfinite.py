"""Handle replicas with NaN or Inf: detect them at launch, exclude their values, repair them.

If a replica continued after a NaN, its weights would remain NaN, and its outer gradient would
spread the NaN to all replicas. So every message has a flag for nonfinite values, which all ranks
read before the fragment lands. With `nonfinite="raise"`, all ranks stop; of an elastic job, only
the replica itself. With "abstain":

1. The mean is taken over the other replicas; if none is finite, all ranks stop.
2. The abstaining replica replaces its local copy of the fragment, including averaged buffers, with
   the global copy, whatever `mix` is. It does the same for every other fragment with a nonfinite
   local copy, because that copy would make all fragments NaN again in the next step.
3. It resets the inner optimizer's state for these parameters where that state is not finite.
4. In the last round (`finish`), its local weights become the mean of the other replicas' weights.

Non-persistent buffers are never exchanged and remain unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.liveness import AgreedError
from lightning_commfree.diloco.exchange import HeaderSummary
from lightning_commfree.diloco.outer import WITHIN_TAG, OuterFragment
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.model.shards import local_tensor

LARGEST = 2.0**119  # limit of the wire formats with the narrowest range
NONFINITE_VALUES = f"NaN, Inf or more than {LARGEST:.1g}"


def refuse_landing(
    summary: HeaderSummary,
    p: int,
    names: Sequence[str],  # of the fragment's parameters
    step: int,
    view: View,  # the replicas that exchanged the fragment
    settings: DiLoCoSettings,
) -> None:
    """Raise a `RuntimeError`, on all replicas alike, if fragment `p` may not land after `step`."""
    if summary.steps_differ:
        found = [
            f"replica {member} ({_ranks_text(member, settings.replica_size)}) had taken {at} steps"
            f" and left out {missed}"
            for member, (at, missed) in zip(view.members, summary.positions, strict=False)
        ]
        # announced, because the others may be at another point of the fit
        raise view.channel.peers.agreed(
            f"The replicas are out of step: the messages for fragment {p}, due after step {step},"
            f" were sent at different positions: {', '.join(found)}. Give every replica the same"
            " number of batches, resume all replicas from the same checkpoint, and take or leave"
            " out a step on all ranks alike: a check on one rank's gradients or loss must be"
            " agreed on first."
        )
    if summary.changes_differ:
        raise RuntimeError(
            "The replicas froze or unfroze different parameters, or the same ones at different"
            f" steps (detected while exchanging fragment {p} after inner step {step}). Set"
            " `requires_grad` on the same parameters at the same step on all ranks."
        )
    if summary.drifted:
        raise RuntimeError(
            f"The replicas' global copies of fragment {p} differ (detected while exchanging it"
            f" after inner step {step}): {', '.join(names)}. They were identical when the fit"
            " began, so either code outside the strategy modified them, or one replica's hardware"
            " is producing incorrect results. Resume from an earlier checkpoint."
        )
    if summary.nonfinite:
        _refuse_nonfinite(summary.nonfinite, p, step, view.members, settings)


def _refuse_nonfinite(
    indices: Sequence[int], p: int, step: int, members: Sequence[int], settings: DiLoCoSettings
) -> None:
    """Raise an error that names the members at `indices`; with "abstain", only if all are."""
    abstains = settings.nonfinite == "abstain"
    if abstains and len(indices) < len(members):
        return

    size = settings.replica_size
    faulty = [members[m] for m in indices]
    named = ", ".join(f"replica {m} ({_ranks_text(m, size)})" for m in faulty)
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


def _ranks_text(replica: int, size: int) -> str:
    first = replica * size
    return f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}"


TAG = "finite"


def refuse_to_save(
    fragments: Sequence[OuterFragment],
    local: Iterable[Tensor],  # `WeightSwap.local`
    rule: str,  # the `nonfinite` setting
    step: int,
    world: Channel,
) -> None:
    """Raise an `AgreedError` on all ranks if any of them would save nonfinite weights.

    Collective over `world`, after the messages of all in-flight fragments have arrived.
    """
    tensors, found = iter(local), []
    for fragment in fragments:
        own = list(islice(tensors, len(fragment.local)))
        # with "abstain" a replica may have NaN: a resumed fit repairs it from the global copy
        values = fragment.outer_gradient(own) if rule == "raise" else fragment.global_copy
        found.append(bool(is_nonfinite(fragment, values)))

    mine = torch.tensor([found.index(True) if any(found) else -1], device=world.device)
    everybody = enumerate(world.all_gather(mine, TAG).wait().flatten().tolist())
    faults = [f"rank {rank}: fragment {p}" for rank, p in everybody if p >= 0]
    if faults:
        raise AgreedError(
            f"The weights are not finite ({NONFINITE_VALUES}) after inner step {step} on"
            f" {', '.join(faults)}. All ranks are stopping, and no checkpoint is written: the"
            " previous one is the last good one. Lower the learning rate, or inspect the"
            " batches on the ranks listed."
        )


def take_global(fragments: Sequence[OuterFragment], p: int, within: Channel | None) -> list[int]:
    """Overwrite the local copies of fragment `p` and of all nonfinite ones; return their indices.

    They become the global copies. Collective within the replica.
    """
    found = [is_nonfinite(fragment, fragment.outer_gradient(), within) for fragment in fragments]
    taken = [q for q, flag in enumerate(found) if flag or q == p]
    for q in taken:
        fragments[q].merge(mix=0.0)
    return taken


def reset_nonfinite_state(
    optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]
) -> None:
    """Reset the optimizer state of each parameter whose state contains NaN or Inf."""
    wanted = list(parameters)
    for optimizer in optimizers:
        for parameter in wanted:
            state = optimizer.state.get(parameter, {})
            tensors = [local_tensor(t) for t in state.values() if isinstance(t, Tensor)]
            tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
            if all(bool(tensor.isfinite().all()) for tensor in tensors):
                continue

            if isinstance(optimizer, torch.optim.Adagrad):  # creates its state in the constructor
                for tensor in tensors:
                    tensor.zero_()
            else:
                del optimizer.state[parameter]


def is_nonfinite(fragment: OuterFragment, values: Tensor, within: Channel | None = None) -> Tensor:
    """Return a 0-d bool: whether any value is NaN, Inf or too large for the wire formats.

    `values` are a fragment's, fp32, shape (S,). The result is on their device; the host does not
    wait. With `within`, it covers the shards of all the replica's ranks, and the call is
    collective.
    """
    parameters, buffers = values[: fragment.parameter_numel], values[fragment.parameter_numel :]
    found = torch.zeros((), dtype=torch.bool, device=values.device)
    if parameters.numel():
        # if there is a NaN, both limits are NaN, and every comparison is False
        low, high = torch.aminmax(parameters)
        found = ~((low > -LARGEST) & (high < LARGEST))
    if buffers.numel():
        # only where the global copy is finite: a buffer may contain -inf by design, such as a mask
        outer = fragment.global_copy[fragment.parameter_numel :]
        outer = outer.to(values.device, non_blocking=True)
        found = found | (outer.isfinite() & ~buffers.isfinite()).any()

    if within is None or within.size == 1:
        return found
    shards = within.all_reduce(found.float().to(within.device), WITHIN_TAG).wait()
    return (shards > 0).to(values.device)
