"""Interface between the algorithm and the network: who takes part, and how values reach them.

The algorithm gives a `Transport` the values of a fragment, and gets the messages of all replicas
that took part. `FixedTransport` is for a job in which the loss of a replica ends the job. In an
elastic job, `elastic.transport` sends and reads messages through a store instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import View
from lightning_commfree.diloco.codec import Codec
from lightning_commfree.diloco.exchange import (
    Arrival,
    Arrived,
    FragmentExchange,
    Header,
    fragment_exchanges,
)
from lightning_commfree.diloco.outer import NONE_FROZEN, Frozen

Messages = tuple[Tensor, Tensor]  # headers and messages, as in `Arrived`
Sizes = Sequence[tuple[int, int]]  # for each fragment, its number of parameter and buffer values


class Delivery(NamedTuple):
    """Result of an exchange: the encoded messages, and the exchange that decodes them."""

    exchange: FragmentExchange
    arrived: Arrived

    def decode(self, device: torch.device, within: Channel | None) -> Arrival:
        """Decode the messages into an `Arrival`; collective within the replica."""
        arrival = self.exchange.decode(self.arrived, device)
        if within is not None and within.size > 1:
            arrival = arrival.shared_within(within)
        return arrival


@dataclass(frozen=True)
class Flight:
    """A fragment that has been launched but has not landed."""

    pending: Pending[Delivery]
    frozen: Frozen = NONE_FROZEN  # at the launch
    launched_s: float = field(default_factory=perf_counter)

    def seconds(self) -> float:
        """Return the time since the launch in seconds."""
        return perf_counter() - self.launched_s


class Transport(Protocol):
    """Interface that exchanges fragments with the other replicas."""

    view: View  # the replicas that take part, as of the latest exchange that was waited for
    background: Background  # thread and side stream that use the channel of `view`

    def open(self, codecs: tuple[Codec, Codec], sizes: Sizes) -> None:
        """Prepare exchanges of all fragments; call this again when a fragment joins.

        The first codec is for launches with a residual, the second one for all others.
        """

    def exchange(self, p: int) -> FragmentExchange:
        """Return the exchange of fragment `p` among the replicas of `view`."""

    def launch(
        self,
        p: int,
        values: Tensor,
        header: Header,
        residual: Tensor | None,
        tag: str,
        device: torch.device,
    ) -> Pending[Delivery]:
        """Start to exchange the values of fragment `p`; pending: the `Delivery`."""

    def wait(self, pending: Pending[Delivery]) -> Delivery:
        """Wait for a delivery; `view` then contains the replicas that took part in the exchange."""

    def saved(self, flights: Mapping[int, Flight]) -> dict[int, Messages]:
        """Wait for in-flight fragments; return the messages that a checkpoint saves of them."""

    def close(self) -> None:
        """Leave the group, and discard in-flight fragments."""


class FixedTransport(Transport):
    """Transport of a job with a fixed number of replicas: the loss of one ends the job."""

    def __init__(self, channel: Channel, timed: bool = False) -> None:
        self._timed = timed  # whether `Arrived.link_s` is needed
        self.view = View.of(channel)
        self.background = Background(channel.ledger, channel.peers)
        self.exchanges: list[FragmentExchange] = []  # with a residual, by fragment
        self.last_exchanges: list[FragmentExchange] = []  # without one

    @override
    def open(self, codecs: tuple[Codec, Codec], sizes: Sizes) -> None:
        """Create an exchange of each fragment for each codec."""
        self.exchanges, self.last_exchanges = fragment_exchanges(
            self.view, codecs, sizes, self.background, self._timed
        )

    @override
    def exchange(self, p: int) -> FragmentExchange:
        """Return the exchange of fragment `p` for launches with a residual."""
        return self.exchanges[p]

    @override
    def launch(
        self,
        p: int,
        values: Tensor,
        header: Header,
        residual: Tensor | None,
        tag: str,
        device: torch.device,
    ) -> Pending[Delivery]:
        """Start exchanging fragment `p` with all replicas of the job; pending: the `Delivery`."""
        exchange = (self.last_exchanges if residual is None else self.exchanges)[p]
        arrived = exchange.launch(values, header, residual, tag, device)
        return arrived.then(lambda arrived: Delivery(exchange, arrived))

    @override
    def wait(self, pending: Pending[Delivery]) -> Delivery:
        """Wait for a delivery and return it; `view` never changes."""
        return pending.wait()

    @override
    def saved(self, flights: Mapping[int, Flight]) -> dict[int, Messages]:
        """Wait for in-flight fragments; return their headers and messages by fragment."""
        arrived = {p: flight.pending.wait().arrived for p, flight in flights.items()}
        return {p: (one.headers, one.messages) for p, one in arrived.items()}

    @override
    def close(self) -> None:
        """Stop the background thread; the channel remains open, because the job owns it."""
        self.background.close()
