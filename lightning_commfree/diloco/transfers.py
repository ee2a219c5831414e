"""A replica's fragments on their way: what leaves, what is in flight, what has arrived.

`streaming` says when they leave and land, and what becomes of what has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.diloco.fragment_exchange import (
    Arrival,
    FragmentExchange,
    cheaper_fragment_exchanges,
)
from lightning_commfree.diloco.message import Header
from lightning_commfree.diloco.outer import REPLICA_TAG, OuterFragment
from lightning_commfree.diloco.refusals import LARGEST, refuse_landing
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.wire import WIRE_FORMATS, WireFormat, warm_up


class FragmentInFlight(NamedTuple):
    """A fragment that has been launched and not landed."""

    exchange: FragmentExchange
    pending: Pending[Tensor]
    launched_s: float  # on the clock of `time.perf_counter`
    step: int  # after which it was launched

    def receive(self, device: torch.device, replica: Channel | None) -> Arrival:
        """Wait for what all have sent and decode it; the ranks of a replica share it."""
        arrival = self.exchange.read(self.pending.wait(), device)
        if replica is not None and replica.size > 1:
            arrival = arrival.shared_within(replica)
        return arrival


class Landing(NamedTuple):
    """One fragment's latest landing."""

    gradient_norm: float  # of the mean outer gradient
    cosine: float  # similarity of the replicas' outer gradients, mean over the pairs
    outer_lr: float  # of the outer step; 1 for the mean at the end of a fit
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


class Transfers:
    """Sends fragments to the other replicas and receives what all of them sent.

    Args:
        fragments: of the model; more may come, and `open` is called again then.
        settings: of the fit.
        channel: to the other replicas.
        replica: to the other ranks of the same replica.

    Attributes:
        exchanges: the way of each fragment.
        flights: what has been launched and not landed, by fragment, in the order of launch.
        landings: the latest `Landing` by fragment.
        background: the thread of the exchanges.
    """

    def __init__(
        self,
        fragments: Sequence[OuterFragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None,
    ) -> None:
        self._fragments, self._settings = fragments, settings
        self._channel, self._replica = channel, replica
        self.wire = WIRE_FORMATS[settings.wire_dtype]

        devices = {tensor.device for f in fragments for tensor in (f.global_copy, *f.local)}
        for device in {*devices, channel.device}:  # a thread averages shards on the channel's
            warm_up(self.wire, device)

        self.background = Background(channel.ledger)
        self.flights: dict[int, FragmentInFlight] = {}
        self.landings: dict[int, Landing] = {}
        self.exchanges: list[FragmentExchange] = []
        self.open()

    def open(self) -> None:
        """Choose the ways of all fragments that there are now."""
        self.exchanges = self.ways(self.wire)

    def ways(self, wire: WireFormat) -> list[FragmentExchange]:
        """Return the cheaper way of each fragment in a wire format."""
        sizes = [(f.parameter_numel, f.shard_numel - f.parameter_numel) for f in self._fragments]
        return cheaper_fragment_exchanges(self._channel, self.background, wire, sizes)

    def send(self, p: int, exchange: FragmentExchange, values: Tensor, header: Header) -> Tensor:
        """Launch the values of a fragment.

        Returns:
            Whether they hold NaN or Inf: bool, no dimension. The header says it too.
        """
        assert p not in self.flights, f"fragment {p} is launched while it is in flight"
        nonfinite = is_nonfinite(self._fragments[p], values, self._replica)
        pending = exchange.launch(values, header._replace(nonfinite=nonfinite))
        self.flights[p] = FragmentInFlight(exchange, pending, time.perf_counter(), header.step)
        return nonfinite

    def receive(self, p: int, step: int) -> tuple[Arrival, FragmentInFlight]:
        """Wait for a fragment that lands after inner step `step`; decode what all have sent.

        Raises:
            RuntimeError: it must not land; see `refuse_landing`.
        """
        flight, fragment = self.flights.pop(p), self._fragments[p]
        ledger = self._channel.ledger
        before_s = ledger.seconds_waited
        flight.pending.wait()
        waited_s = ledger.seconds_waited - before_s

        arrival = flight.receive(fragment.global_copy.device, self._replica)
        if arrival.steps_differ or arrival.drifted or arrival.nonfinite:
            names = fragment.fragment.parameters
            refuse_landing(arrival, p, names, step, self._channel, self._settings)

        before = self.landings[p].abstentions if p in self.landings else 0
        self.landings[p] = Landing(
            arrival.norm,
            arrival.cosine,
            float(fragment.optimizer.param_groups[0]["lr"]),
            time.perf_counter() - flight.launched_s,
            waited_s,
            flight.exchange.num_bytes,
            len(arrival.nonfinite) + before,
        )
        return arrival, flight

    def wait(self) -> None:
        """Take what is in flight off the wire; it still lands at its step."""
        for flight in self.flights.values():
            flight.pending.wait()

    def state_dict(self) -> dict[int, Tensor]:
        """Return what has arrived of each fragment in flight; waits for it."""
        return {p: flight.pending.wait() for p, flight in self.flights.items()}

    def load_state_dict(self, state: dict[int, Tensor], launched: dict[int, int]) -> None:
        """Put back what `state_dict` returned.

        Args:
            state: by fragment.
            launched: by fragment, the inner step after which it was launched.
        """
        assert not self.flights, "a state is loaded before the first step"
        for p, arrived in state.items():
            pending, now = Pending.here(arrived), time.perf_counter()
            self.flights[p] = FragmentInFlight(self.exchanges[p], pending, now, launched[p])


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
