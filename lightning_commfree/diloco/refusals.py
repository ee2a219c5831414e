"""What ends a fit on all ranks: what all replicas sent of a fragment must not land."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco.fragment_exchange import Arrival
from lightning_commfree.diloco.settings import DiLoCoSettings

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
    raise RuntimeError(
        f"What {named} sent of fragment {p} is not finite ({NONFINITE_VALUES}); it was to land"
        f" after inner step {step}. All ranks stop; it has landed nowhere. {hint}"
    )


def _ranks_of(replica: int, size: int) -> str:
    first = replica * size
    return f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}"
