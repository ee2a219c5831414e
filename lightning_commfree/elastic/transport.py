"""Exchange fragments between replicas that join, leave and die.

Exchanges are numbered in launch order; the code calls a numbered exchange a *flight*. Each exchange
runs on a background thread:

1. The members agree on a *view*: the replicas that take part in the exchange (`membership`).
2. The values are encoded for that view and exchanged. They are kept in fp32 until the exchange has
   completed: if a member dies in the meantime, the exchange is repeated from step 1. If another
   member has already completed it, the messages are fetched from that member instead.
3. The messages are kept, still encoded, for a few cycles, so that other replicas can fetch them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import Route, View
from lightning_commfree.diloco.codec import Codec
from lightning_commfree.diloco.exchange import Arrived, FragmentExchange, Header, cheaper_exchange
from lightning_commfree.diloco.transport import Delivery, Flight, Messages, Sizes, Transport
from lightning_commfree.elastic.membership import ElasticMembership, Member

T = TypeVar("T")
_log = logging.getLogger(__name__)

POLL_S = 0.02  # how often a joiner polls a member for new messages
_KEPT_CYCLES = 2  # number of cycles whose messages are kept
_KEPT_CYCLES_FOR_JOINERS = 8  # the same, while a replica is joining
_MAX_FAILURES = 5  # maximum number of failures of an exchange in views of the same members


class ElasticTransport(Transport):
    """Transport in which the members agree on a view before each exchange.

    Attributes:
        view: the replicas that took part in the latest exchange that was waited for.
        launched: number of exchanges launched so far, which is also the number of the next one.
        views: one pair per exchange in which this replica took part: the number of the exchange,
            and the slots of its members.
        sent: latest exchange in which others may have received this replica's values.
    """

    def __init__(self, membership: ElasticMembership) -> None:
        self.membership = membership
        self.launched, self.sent = 0, -1
        self.views: list[tuple[int, tuple[int, ...]]] = []
        self._thread, self._inline = Background(membership.ledger), _Inline(membership.ledger)
        self._kept: dict[int, dict[str, Any]] = {}  # messages, by number of the exchange
        self._codecs: dict[bool, Codec] = {}  # by whether there is a residual
        self._sizes: Sizes = ()
        self.enter(membership.view())

    def enter(self, view: View) -> None:
        """Use `view` from now on."""
        self.view, self.background = view, Background(view.channel.ledger, view.channel.peers)

    @override
    def open(self, codecs: tuple[Codec, Codec], sizes: Sizes) -> None:
        corrects, last = codecs
        self._codecs, self._sizes = {True: corrects, False: last}, sizes

    @override
    def exchange(self, p: int) -> FragmentExchange:
        return cheaper_exchange(self.view, self._codecs[True], *self._sizes[p], self._inline)

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
        """Also number the exchange and, with `sync="time"`, announce it to the other members."""
        del device  # messages are decoded at the landing, because an exchange may be repeated
        flight, self.launched = self.launched, self.launched + 1
        if self.membership.by_time:
            self.membership.announce(flight)
        return self._thread.submit(
            lambda: self._fly(flight, p, values, header, residual), tag, device=values.device
        )

    def _fly(
        self, flight: int, p: int, values: Tensor, header: Header, residual: Tensor | None
    ) -> Delivery:
        """Exchange a fragment's values; if a member is lost, repeat the exchange in a new view.

        This runs on the background thread. If another member has already completed the exchange,
        fetch the messages from that member instead.
        """
        if values.is_cuda:
            torch.cuda.set_device(values.device)  # for this thread
        failures: list[tuple[int, ...]] = []
        while True:
            found = self.membership.agree(flight, header.step)
            if isinstance(found, Member):
                message = self._fetch(found, flight)
                if message is None:  # that member is gone or no longer has the message
                    continue
                delivery = self.delivery(message, p)
                break
            self.sent = flight
            codec = self._codecs[residual is not None]
            exchange = cheaper_exchange(found, codec, *self._sizes[p], self._inline)
            arrived, error = None, None
            try:
                arrived = exchange.launch(values, header, residual).wait()
            except RuntimeError as raised:
                error = raised
            if not self.membership.ranks.all(error is None):
                _log.warning("An exchange with slots %s failed: %s", list(found.members), error)
                self.membership.failed()
                failures.append(found.members)
                if failures.count(found.members) == _MAX_FAILURES:
                    raise error or RuntimeError("Exchanges fail on another rank of this replica.")
                continue
            assert arrived is not None
            delivery = Delivery(exchange, arrived)
            message = {
                "flight": flight,
                "members": list(found.members),
                "two_phase": exchange.route.two_phase,
                "corrects": residual is not None,
                "headers": arrived.headers,
                "arrived": arrived.messages,
            }
            self.views.append((flight, found.members))
            break
        self.keep(message)
        return delivery

    @override
    def wait(self, pending: Pending[Delivery]) -> Delivery:
        delivery = pending.wait()
        view = delivery.exchange.route.view
        if view is not self.view:
            self.enter(view)
        return delivery

    def reset(self) -> None:
        """Replace the background thread: after an error, it fails every later task."""
        self._thread.close()
        self._thread = Background(self.membership.ledger)

    @override
    def saved(self, flights: Mapping[int, Flight]) -> dict[int, Messages]:
        del flights
        return {}  # a new job starts from outer weights, a joiner asks a member

    @override
    def close(self) -> None:
        self.background.close()
        self.membership.leave()
        self._thread.close()

    # -- messages for other replicas, and from them

    def messages(self, first: int) -> list[dict[str, Any]]:
        """Return the encoded messages of all completed exchanges from number `first` on.

        Raises:
            LookupError: some of these messages are no longer available.
        """
        kept = dict(self._kept)
        if first < min(kept, default=first):
            oldest = f"the oldest one kept is {min(kept)}"
            raise LookupError(f"the in-flight exchange {first} is no longer available; {oldest}")
        return [kept[flight] for flight in sorted(kept) if flight >= first]

    def keep(self, message: dict[str, Any]) -> None:
        """Keep the messages of an exchange for other replicas, and drop those that are too old."""
        flight = message["flight"]
        self._kept[flight] = message
        cycles = _KEPT_CYCLES_FOR_JOINERS if self.membership.is_joined else _KEPT_CYCLES
        for old in [n for n in self._kept if n <= flight - cycles * len(self._sizes)]:
            del self._kept[old]

    def _fetch(self, member: Member, flight: int) -> dict[str, Any] | None:
        """Fetch the messages of an exchange from a member that has completed it.

        Return None if the member is gone or no longer has the messages.
        """
        try:
            messages = self.membership.transfer.fetch_messages(self.address(member), flight)
        except (ConnectionError, LookupError):
            messages = []
        found = next((m for m in messages if m["flight"] == flight), None)
        if self.membership.ranks.all(found is not None):
            return found
        time.sleep(POLL_S)
        return None

    def address(self, member: Member) -> str:
        """Return the address of the member's rank that holds the same shards as this one."""
        return member.states[self.membership.ranks.rank]

    def delivery(self, message: Mapping[str, Any], p: int) -> Delivery:
        """Return a `Delivery` of fetched messages, with an exchange that can decode them."""
        members, slot = tuple(message["members"]), self.membership.record.slot
        channel = Channel([0], 0, self.membership.ledger)
        channel.rank = members.index(slot) if slot in members else -1
        route = Route(View(-1, members, channel), message["two_phase"])
        codec = self._codecs[message["corrects"]]
        exchange = FragmentExchange(route, codec, *self._sizes[p], self._inline)
        return Delivery(exchange, Arrived(message["headers"], message["arrived"]))


class _Inline(Background):
    """Runs each task on the thread that waits for its result, instead of a background thread.

    All exchanges of an elastic job already run on one background thread.
    """

    @override
    def submit(
        self,
        task: Callable[[], T],
        tag: str,
        staged: Callable[[], object] | None = None,
        device: torch.device | None = None,
    ) -> Pending[T]:
        return Pending(task)
