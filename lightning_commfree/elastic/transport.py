"""Exchange fragments through a job's log (`elastic.log`).

A rank creates one message per flight, whatever the number of replicas. It reads the messages of the
same rank in the other replicas that the flight's commit lists or, if these are many, what their
owners have made of the parts (`elastic.parts`). It decodes both as in a job of fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco.codec import Codec
from lightning_commfree.diloco.exchange import TAG, Header
from lightning_commfree.diloco.transport import Delivery, Flight, Messages, Sizes, Transport
from lightning_commfree.elastic.log import ABSTAINS, JobLog, Landed
from lightning_commfree.elastic.parts import StoreExchange, num_parts, routes, sealed

NOT_LISTED = -1  # rank in a view whose members do not include this replica


class StoreTransport(Transport):
    """Transport through a store.

    Attributes:
        view: the replicas in the commit of the latest flight that was waited for; `members` are
            their slots. The rank is `NOT_LISTED` if this replica is not among them.
        log: this replica's access to the log.
        flights: number of the flight in which each fragment was last launched.
        follows: whether the latest launch sent no message, because its flight was decided already.
        abstained: whether this replica had no finite values for the latest flight.
    """

    def __init__(self, log: JobLog, ledger: Ledger) -> None:
        self.log, self._ledger = log, ledger
        self.view, self.background = View(-1, (0,), Channel([0], 0, ledger)), Background(ledger)
        self.flights: dict[int, int] = {}
        self.follows = self.abstained = False
        self._codecs: dict[bool, Codec] = {}  # by whether there is a residual
        self._sizes: Sizes = ()

    @override
    def open(self, codecs: tuple[Codec, Codec], sizes: Sizes) -> None:
        corrects, last = codecs
        self._codecs, self._sizes = {True: corrects, False: last}, sizes

    @override
    def exchange(self, p: int) -> StoreExchange:
        """Return the exchange of a fragment in `view`; before any flight, of `min_replicas`."""
        view = self.view
        if not self.has_landed:  # a forecast: how many will come is not known
            view = view._replace(members=tuple(range(max(self.log.min_replicas, 1))))
        return self._exchange(p, self._codecs[True], view)

    def message_bytes(self, flight: int) -> set[int]:
        """Return the sizes that a message in a flight may have."""
        p = flight % len(self._sizes)
        codecs = self._codecs.values()
        return {self._exchange(p, codec, self.view).message_bytes for codec in codecs}

    def reduction(self, flight: int, members: int) -> StoreExchange | None:
        """Return the exchange of a flight with so many members if some of them own its parts."""
        # any codec: there are two only with error feedback, which excludes the two-phase route
        view = View(flight, tuple(range(max(members, 1))), Channel([0], 0, self._ledger))
        exchange = self._exchange(flight % len(self._sizes), self._codecs[True], view)
        return exchange if exchange.route.two_phase else None

    @property
    def has_landed(self) -> bool:
        """Whether `view` is the view of a flight."""
        return self.view.number >= 0

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
        del device  # messages are decoded at the landing
        codec = self._codecs[residual is not None]
        exchange = self._exchange(p, codec, self.view)
        flight = self.flights[p] = self.log.launch()
        self.follows = bool(self.log.ranks.first(lambda: self.log.is_decided(flight)))
        if not self.follows:
            staged = self.background.staging.stage(
                lambda: exchange.write(values, header, residual), header.on_device(values)
            )
            self.log.send(flight, lambda: self._message(exchange, staged(), tag))
        return self._pending(p, flight, codec, tag)

    def follow(self, p: int) -> Flight:
        """Take part in the next flight, one of fragment `p`, without a message."""
        self.follows = True
        self.flights[p] = self.log.launch()
        return Flight(self._pending(p, self.flights[p], self._codecs[True], TAG))

    def _pending(self, p: int, flight: int, codec: Codec, tag: str) -> Pending[Delivery]:
        """Return a pending result that waits for the commit and the messages."""

        def result() -> Delivery:
            with self._ledger.count_wait(tag):
                return self._delivery(p, codec, self.log.landed(flight))

        return Pending(result)

    def _message(self, exchange: StoreExchange, parts: Tensor, tag: str) -> bytes:
        """Return the bytes to send; this runs on the log's thread that creates messages."""
        header = Header(*exchange.arrived(parts).headers[0].tolist())
        message = sealed([part.tobytes() for part in parts.numpy()])
        if header.nonfinite:
            message = ABSTAINS
        self._ledger.count_sent(tag, len(message))
        return message

    def _exchange(self, p: int, codec: Codec, view: View) -> StoreExchange:
        """Return the exchange of a fragment between the members of a view.

        It takes the route on which a member moves fewer bytes.
        """
        parts = num_parts(self._sizes[p][0], self._codecs[True])
        exchanges = [
            StoreExchange(route, codec, *self._sizes[p], self.background)
            for route in routes(view, parts)
        ]
        return min(exchanges, key=lambda exchange: exchange.moved_bytes)

    def _delivery(self, p: int, codec: Codec, landed: Landed) -> Delivery:
        """Return what was read for a commit, with the view of those that it lists."""
        if not landed.members:
            raise RuntimeError(
                f"No replica has finite values for fragment {p} (NaN or Inf), so there is nothing"
                " to average. Start another job from an earlier checkpoint, with a lower learning"
                " rate."
            )
        self.abstained = landed.abstained
        names = [member.name for member in landed.members]
        channel = Channel([0], 0, self._ledger)  # nothing is sent on it
        mine = self.log.name_in(self.flights[p])
        channel.rank = names.index(mine) if mine in names else NOT_LISTED
        slots = tuple(member.slot for member in landed.members)
        exchange = self._exchange(p, codec, View(self.flights[p], slots, channel))
        return Delivery(exchange, exchange.received(landed.objects)._replace(link_s=landed.link_s))

    @override
    def wait(self, pending: Pending[Delivery]) -> Delivery:
        delivery = pending.wait()
        self.view = delivery.exchange.route.view
        return delivery

    @override
    def saved(self, flights: Mapping[int, Flight]) -> dict[int, Messages]:
        """Return no messages to save: the log keeps those of fragments in flight."""
        del flights
        return {}

    @override
    def close(self) -> None:
        self.background.close()
        self.log.close()
