"""Why a step is refused, in words; nothing has been changed then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.lion.ballot_exchange import VoteResult
from lightning_commfree.lion.buckets import Bucket
from lightning_commfree.lion.worker import Member, hyperparameters


def refusal(
    step: int,
    buckets: Sequence[Bucket],
    results: Sequence[VoteResult],
    members: Callable[[Sequence[nn.Parameter]], list[Member]],
    faults: bool,
    channel: Channel,
    node: Channel | None,
) -> RuntimeError:
    """Return the error for a step that may not be taken.

    Args:
        step: its number.
        buckets: that are voted on.
        results: of the votes on them.
        members: as `Voting` takes it.
        faults: NaN or Inf refuses a step.
        channel: to the other workers.
        node: to the ranks that form one worker with this one.
    """
    for bucket, (summary, _) in zip(buckets, results, strict=True):
        names = bucket.names
        if summary.hyperparameters_differ:
            here = "; ".join(hyperparameters(members(bucket.parameters)))
            return RuntimeError(
                "Learning rate, betas or weight decay differ between the workers before step"
                f" {step}, for {names[0]!r} among others, and the same votes would move their"
                f" parameters apart; on this rank: {here}. No parameter was changed. Set them"
                " alike on all ranks: a scheduler on a metric has to watch one that is logged per"
                " epoch with `sync_dist=True`."
            )

        if summary.parameters_differ:
            return RuntimeError(
                f"The workers' parameters differ before step {step}, among them"
                f" {', '.join(map(repr, names[:5]))}. Only votes may change them: look for code"
                " that writes to parameters on some ranks."
            )

        if summary.faults and faults:
            worker, i = summary.faults[0]
            more = f" (and {len(summary.faults) - 1} more)" if len(summary.faults) > 1 else ""
            return RuntimeError(
                f"The gradient of {names[i]!r} on {_ranks_of(worker, channel, node)} holds NaN or"
                f" Inf{more}, before step {step}. All ranks stop; no parameter was changed. Lower"
                " the learning rate or look at that rank's batch; `nonfinite='abstain'` would"
                " leave such a worker out of the vote."
            )

    return RuntimeError(
        "A rank that votes on another part of this worker's parameters has refused step"
        f" {step}; its own message says why. All ranks stop; no parameter was changed."
    )


def _ranks_of(worker: int, channel: Channel, node: Channel | None) -> str:
    rank = channel.ranks[worker]
    if node is None:
        return f"rank {rank}"
    first = rank - node.rank
    return f"ranks {first} to {first + node.size - 1}"
