"""What a fragment's landing says, and when it must not land at all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.diloco.fragment_exchange import Arrival, FragmentExchange
from lightning_commfree.diloco.nonfinite import refuse_nonfinite
from lightning_commfree.diloco.settings import DiLoCoSettings


class FragmentInFlight(NamedTuple):
    """A fragment that has been launched and not landed."""

    exchange: FragmentExchange
    pending: Pending[Tensor]
    launched_s: float  # on the clock of `time.perf_counter`
    step: int  # after which it was launched


class Landing(NamedTuple):
    """One fragment's latest landing."""

    gradient_norm: float  # of the mean outer gradient
    cosine: float  # similarity of the replicas' outer gradients, mean over the pairs
    outer_lr: float  # with which the outer step was taken; 1 for the mean at the end of a fit
    flight_s: float  # seconds from launch to landing
    waited_s: float  # seconds of it in which the training stood still
    num_bytes: int  # sent by this replica
    abstentions: int  # how often a replica has been left out of this fragment's mean, so far

    def figures(self) -> dict[str, float]:
        """Return it for a log, by name; times in ms."""
        return {
            "gradient_norm": self.gradient_norm,
            "cosine": self.cosine,
            "lr": self.outer_lr,
            "flight_ms": 1e3 * self.flight_s,
            "waited_ms": 1e3 * self.waited_s,
            "bytes": float(self.num_bytes),
            "abstentions": float(self.abstentions),
        }

    @classmethod
    def of(
        cls,
        arrival: Arrival,
        flight: FragmentInFlight,
        lr: float,
        waited_s: float,
        before: Landing | None,
    ) -> Landing:
        """Return what to say of a landing now; `before`: the same fragment's latest one."""
        return cls(
            arrival.norm,
            arrival.cosine,
            lr,
            time.perf_counter() - flight.launched_s,
            waited_s,
            flight.exchange.num_bytes,
            len(arrival.nonfinite) + (before.abstentions if before else 0),
        )


def receive(flight: FragmentInFlight, device: torch.device, replica: Channel | None) -> Arrival:
    """Wait for what is in flight and decode it on `device`; the ranks of a replica share it."""
    arrival = flight.exchange.read(flight.pending.wait(), device)
    if replica is not None and replica.size > 1:
        arrival = arrival.shared_within(replica)
    return arrival


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
    refuse_nonfinite(arrival.nonfinite, settings.nonfinite, p, step, channel, settings.replica_size)
