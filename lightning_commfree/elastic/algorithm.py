"""Streaming DiLoCo with replicas that join, leave and die.

The algorithm is the same as in `streaming`; only the exchanges of fragments differ. Exchanges are
numbered in launch order; the code calls a numbered exchange a *flight*. Each exchange runs on a
background thread:

1. The members agree on a *view*: the replicas that take part in the exchange (`membership`).
2. The outer gradient is encoded for that view and exchanged. It is kept in fp32 until the exchange
   has completed: if a member dies in the meantime, the exchange is repeated from step 1. If another
   member has already completed the exchange, the messages are fetched from that member instead.
3. The messages are kept, still encoded, for a few cycles.

A joining replica fetches the outer state from a member (`snapshot`), and uses the kept messages to
replay the landings that it has missed. From the next launch on, it takes part in the exchanges. It
never takes the inner steps before that launch. The other members do not wait for it.

A replica that was suspended or cut off from the network may find that the others have continued
without it. It rejoins in the same way, but keeps its inner optimizer's state and the inner steps
that it has not sent yet: it adds the difference between its local weights and its previous outer
weights to the new outer weights. It continues to train in the meantime.

In the mean, a replica's values are weighted by the number of inner steps that the replica has taken
since the fragment last landed on it, or since it joined. So the first message of a new replica,
which contains only zeros, has weight 0.

*Replicas with different speeds.* All replicas share one schedule, and `step` is a replica's
position in it. By default, every replica takes every step. With `sync="time"`, only the fastest
replica does, and it announces each launch to the others. A slower replica finishes its current
step, advances to the same position in the schedule without training, launches its own fragment, and
continues from there. So no replica waits longer than one step of another replica. Skipped steps do
not distort the mean, because a replica's weight counts only the inner steps that it has actually
taken.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import Route, View
from lightning_commfree.comm.requests import STOP, Requests
from lightning_commfree.diloco.codec import Codec
from lightning_commfree.diloco.exchange import (
    TAG,
    Arrived,
    Flight,
    FragmentExchange,
    Header,
    cheaper_exchange,
)
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.messages import Message, startup_messages
from lightning_commfree.diloco.outer import NONE_FROZEN, Frozen
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.elastic.membership import (
    TOO_LATE,
    ElasticMembership,
    LeftBehindError,
    Member,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)

_POLL_S = 0.02  # how often a joiner polls a member for new messages
_KEPT_CYCLES = 2  # number of cycles whose messages are kept
_KEPT_CYCLES_FOR_JOINERS = 8  # the same, while a replica is joining
_LATEST_VIEWS = 100  # number of views that a snapshot lists
_MAX_FAILURES = 5  # maximum number of failures of an exchange in views of the same members


class Delivery(NamedTuple):
    """Result of an exchange: the encoded messages, and the `FragmentExchange` that decodes them."""

    exchange: FragmentExchange
    arrived: Arrived


class ElasticDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo on one replica of an elastic job, in which replicas join, leave and die.

    Args:
        module: the model, as in `StreamingDiLoCo`.
        fragments: a partition of the model's trainable parameters.
        settings: settings of the fit; `evaluate` must be "outer".
        membership: this replica's membership in the job, not yet started.
        within: channel between the ranks of this replica, as in `StreamingDiLoCo`.

    Attributes:
        launched: number of exchanges launched so far, which is also the number of the next one.
        landed: number of exchanges that have landed on this replica, in launch order.
        joined: number of the exchange with which this replica joined the job; None if it is one of
            the replicas that created the job.
        rejoined: numbers of the exchanges with which this replica rejoined the job.
        may_rejoin: whether this replica rejoins the job if the other replicas have continued
            without it. Set it only if this replica has a single rank and at most one fragment is in
            flight at a time.
        discarded: number of inner steps whose updates were lost when this replica rejoined. A step
            that was lost for k of P fragments counts as k / P steps.
        inner_steps: number of inner steps that this replica has taken itself; `step` is its
            position in the schedule, which is the same on all replicas at a launch.
        skipped: number of steps of the schedule that were skipped after the latest inner step.
        last_step: the step after which the fit ends. A replica skips no steps beyond it.
        views: one pair per exchange in which this replica took part: the number of the exchange,
            and the slots of its members.
        weight_per_step: weight of one inner step in a mean, such as its number of samples.
    """

    _membership: ElasticMembership

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        membership: ElasticMembership,
        within: Channel | None = None,
        requests: Requests | None = None,
    ) -> None:
        assert settings.evaluate == "outer", "other weights need all replicas at the same time"
        ledger = membership.ledger
        self._thread, self._inline = Background(ledger), _Inline(ledger)
        self._outer_lock = threading.Lock()  # the state server reads the outer state
        self._kept: dict[int, dict[str, Any]] = {}  # messages, by number of the exchange
        self._deliveries: dict[int, Pending[Delivery]] = {}  # by fragment
        self._trained_since = [0] * len(fragments)  # `inner_steps` at each last landing
        self.launched = self.landed = self.inner_steps = self.skipped = 0
        self.views: list[tuple[int, tuple[int, ...]]] = []
        self.weight_per_step, self.last_step = 1, math.inf
        self.joined: int | None = None
        self.rejoined: list[int] = []
        self.may_rejoin, self.discarded = False, 0.0
        self._sent = -1  # latest exchange in which others may have received this replica's values
        self._outer_found: Future[None] | None = None  # `_find_outer`, while this replica rejoins
        # by fragment: the weights before its unsent inner steps, and `inner_steps` at that time
        self._bases: list[tuple[Tensor, int]] = []
        self._others_step = 0
        self._landed_steps = self._last_steps = 0  # inner steps in the latest landing
        self._donors_views: dict[int, tuple[int, ...]] = {}  # member slots by exchange
        super().__init__(module, fragments, settings, membership, within, requests)
        self._frozen_digests = self._frozen.digests()
        membership.transfer.serve(self.snapshot, self.messages)

    @override
    def _warm_up(self) -> None:
        # on a thread, because a joiner fetches the state at the same time
        self._warming = threading.Thread(target=super()._warm_up, name="warm-up", daemon=True)
        self._warming.start()

    # -- a fit

    def begin(self, fingerprint: Mapping[str, str]) -> bool:
        """Create the job or join it; return whether this replica joined an existing job.

        When the job is created, this blocks until `min_replicas` replicas are present. A joiner
        blocks until the other replicas' next launch. Afterwards, the local weights equal the outer
        weights, which are the same on all replicas, and `step` is the step that the replicas have
        reached.

        Args:
            fingerprint: description of the settings and the model; must be the same on all
                replicas.

        Raises:
            RuntimeError: the job has ended, all slots are taken, or no replica is left.
            ValueError: this replica's fingerprint differs from the other replicas' fingerprint.
        """
        membership = self._membership
        while membership.start(fingerprint, self.step, self.launched):
            self._enter(membership.view())
            first = membership.view_members[0]
            if self.view.rank:
                if not self._take_snapshot(first):
                    continue  # the first member is gone, so start again
                self._take_outer(self.step)
            self._warming.join()
            return False
        self._join_job()
        return True

    @override
    def after_step(self) -> None:
        self.inner_steps += 1
        if self.is_rejoining:
            self.step += 1
            self.skipped = self._rejoin()
            return
        self.skipped = 0
        try:
            super().after_step()
        except LeftBehindError:
            steps_in_flight = self.settings.overlap_steps * len(self.fragments)
            # the other replicas have landed the only in-flight fragment without this replica
            if not (self.may_rejoin and 0 < steps_in_flight < self.settings.sync_every):
                raise
            self._begin_to_rejoin()
            self.skipped = self._rejoin()
        while self._is_behind and not self.requests.stops:
            super().after_step()
            self.skipped += 1

    @property
    def _is_behind(self) -> bool:
        """Whether another replica has already launched this replica's next exchange.

        If so, this replica must skip steps. This is always False with `sync="steps"`, and once
        `last_step` has been reached.
        """
        membership = self._membership
        by_time = membership.by_time and self.step < self.last_step
        return by_time and membership.is_launched(self.launched)

    @override
    def finish(self) -> None:
        if self.is_rejoining:
            self._rejoin(must=True)
        self._membership.end()
        super().finish()

    def drain(self, seconds: float) -> None:
        """Wait for in-flight exchanges to complete, for at most `seconds`.

        Call this before this replica leaves the job, so that the other replicas get its values.
        """

        def wait() -> None:
            with suppress(RuntimeError):
                for p in self.flights:
                    self._deliveries[p].wait()

        waiting = threading.Thread(target=wait, name="drain", daemon=True)
        waiting.start()
        waiting.join(seconds)

    @override
    def close(self) -> None:
        super().close()
        self._thread.close()

    # -- exchanges

    @override
    def _launch(
        self, p: int, values: Tensor, header: Header, residual: Tensor | None, tag: str
    ) -> Flight:
        # messages are decoded at the landing, because an exchange may be repeated
        flight, self.launched = self.launched, self.launched + 1
        if self._membership.by_time:
            self._membership.announce(flight)
        self._deliveries[p] = self._thread.submit(
            lambda: self._fly(flight, p, values, header, residual), tag, device=values.device
        )
        arrived = self._deliveries[p].then(lambda delivery: delivery.arrived)
        return Flight(self._exchanges[p], arrived)  # `_wait` sets the exchange

    def _fly(
        self, flight: int, p: int, values: Tensor, header: Header, residual: Tensor | None
    ) -> Delivery:
        """Exchange a fragment's values; if a member is lost, repeat the exchange in a new view.

        This runs on the background thread. If another member has already completed the exchange,
        fetch the messages from that member instead.

        Args:
            flight: number of the exchange.
            p: index of the fragment.
            values: fp32 values to send, shape (S,).
            header: metadata to send with the values.
            residual: receives the codec's rounding error; None if there is no error feedback.
        """
        if values.is_cuda:
            torch.cuda.set_device(values.device)  # for this thread
        failures: list[tuple[int, ...]] = []
        while True:
            found = self._membership.agree(flight, header.step)
            if isinstance(found, Member):
                message = self._fetch(found, flight)
                if message is None:  # that member is gone or no longer has the message
                    continue
                delivery = self._decoder(message, p)
                break
            self._sent = flight
            codec = self._codec(residual is None)
            exchange = cheaper_exchange(found, codec, *self._sizes(p), self._inline)
            arrived, error = None, None
            try:
                arrived = exchange.launch(values, header, residual).wait()
            except RuntimeError as raised:
                error = raised
            if not self._membership.ranks.all(error is None):
                _log.warning("An exchange with slots %s failed: %s", list(found.members), error)
                self._membership.failed()
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
        self._keep(message)
        return delivery

    @override
    def _wait(self, p: int) -> Flight:
        delivery = self._deliveries[p].wait()
        view = delivery.exchange.route.view
        if view is not self.view:
            self._enter(view)
        self.flights[p] = replace(self.flights[p], exchange=delivery.exchange)
        return self.flights[p]

    @override
    def wait_in_flight(self) -> None:
        # if the others have continued without this replica, the landing raises this error again
        with suppress(LeftBehindError):
            super().wait_in_flight()

    @override
    def _messages_in_flight(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}  # not saved: a new job starts from outer weights, a joiner asks a member

    @override
    def _weight(self, p: int) -> int:
        return (self.inner_steps - self._trained_since[p]) * self.weight_per_step

    @override
    def _outer_step(self, p: int, mean: Tensor, frozen: Frozen = NONE_FROZEN) -> None:
        with self._outer_lock:
            super()._outer_step(p, mean, frozen)
            self.landed += 1
        self._landed_steps = self.inner_steps - self._trained_since[p]
        self._trained_since[p] = self.inner_steps

    @override
    def _take_mean(self, p: int, mean: Tensor | None, frozen: Frozen = NONE_FROZEN) -> None:
        with self._outer_lock:
            super()._take_mean(p, mean, frozen)
            self.landed += 1
        self._trained_since[p] = self.inner_steps

    def _codec(self, is_last: bool) -> Codec:
        """Return the configured codec or, if `is_last`, the codec for a fit's last exchanges.

        The latter uses no error feedback, because no later exchange could correct its errors.
        """
        return self._last_codec if is_last else self.codec

    def _sizes(self, p: int) -> tuple[int, int]:
        fragment = self.fragments[p]
        return fragment.parameter_numel, fragment.shard_numel - fragment.parameter_numel

    @property
    def has_landed(self) -> bool:
        """Whether a fragment has landed since the latest inner step."""
        return self.inner_steps in self._trained_since

    @property
    def slot(self) -> int:
        """This replica's slot: the index of its share of the data, and its ID in `views`.

        Valid after `begin`.
        """
        return self._membership.record.slot

    def model_hash(self) -> str:
        """Hash the parameters' names, shapes and dtypes, and the values of frozen parameters."""
        named = [(n, [*p.shape], str(p.dtype)) for n, p in self._module.named_parameters()]
        text = repr((named, self._frozen_digests))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @override
    def startup_messages(self, steps: int | None) -> list[Message]:
        # 2 replicas instead of the current number, which may change
        last_step = None if steps is None else self.step + steps
        return startup_messages(self._module, self.settings, self.schedule, 2, last_step)

    # -- data for other replicas

    def snapshot(self) -> dict[str, Any]:
        """Copy the outer state for a joining replica.

        The copy also contains the latest views and `landed`, the number of exchanges whose results
        the state includes.
        """
        with self._outer_lock:
            states = [fragment.state_dict() for fragment in self.fragments]
            views = self.views[-_LATEST_VIEWS:]
            return copy.deepcopy({"landed": self.landed, "fragments": states, "views": views})

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

    def _keep(self, message: dict[str, Any]) -> None:
        flight = message["flight"]
        self._kept[flight] = message
        cycles = _KEPT_CYCLES_FOR_JOINERS if self._membership.is_joined else _KEPT_CYCLES
        for old in [n for n in self._kept if n <= flight - cycles * len(self.fragments)]:
            del self._kept[old]

    def _fetch(self, member: Member, flight: int) -> dict[str, Any] | None:
        """Fetch the messages of an exchange from a member that has completed it.

        Return None if the member is gone or no longer has the messages.
        """
        try:
            messages = self._membership.transfer.fetch_messages(self._address(member), flight)
        except (ConnectionError, LookupError):
            messages = []
        found = next((m for m in messages if m["flight"] == flight), None)
        if self._membership.ranks.all(found is not None):
            return found
        time.sleep(_POLL_S)
        return None

    def _address(self, member: Member) -> str:
        return member.states[self._membership.ranks.rank]

    def _decoder(self, message: Mapping[str, Any], p: int) -> Delivery:
        """Return a `Delivery` of fetched messages, with an exchange that can decode them."""
        members, slot = tuple(message["members"]), self._membership.record.slot
        channel = Channel([0], 0, self._membership.ledger)
        channel.rank = members.index(slot) if slot in members else -1
        route = Route(View(-1, members, channel), message["two_phase"])
        codec = self._codec(not message["corrects"])
        exchange = FragmentExchange(route, codec, *self._sizes(p), self._inline)
        return Delivery(exchange, Arrived(message["headers"], message["arrived"]))

    # -- joining

    def _join_job(self) -> None:
        """Join a running job: fetch its outer state, and take part in its next exchange."""
        self._find_outer()
        self.joined = self.landed
        self._launch_joined()

    @property
    def is_rejoining(self) -> bool:
        """Whether this replica is no longer a member of the job, but is about to rejoin."""
        return self._outer_found is not None

    def _begin_to_rejoin(self) -> None:
        self._bases = []
        for p, fragment in enumerate(self.fragments):
            base, since = fragment.global_copy.clone(), self._trained_since[p]
            if p in self.flights and self._sent == self.launched - 1:
                # other replicas may have received these steps, so they cannot be sent again
                self.discarded += (self.inner_steps - since) / len(self.fragments)
                base, since = fragment.local_values(), self.inner_steps
            self._bases.append((base, since))
        self.flights.clear()
        self._deliveries.clear()
        self._thread.close()  # after an error, a thread fails every later task
        self._thread = Background(self._membership.ledger)
        self._others_step = self._membership.others_step
        self._last_steps = self._landed_steps  # replayed landings change it
        executor = ThreadPoolExecutor(1, "rejoin")
        self._outer_found = executor.submit(self._find_outer)
        executor.shutdown(wait=False)

    def _rejoin(self, must: bool = False) -> int:
        """Rejoin the job if the current outer state has been fetched.

        If the fetch is still in progress, return immediately, so that training continues. However,
        wait for the fetch if this replica has reached the last known step of the other replicas, or
        if `must` is True.

        Returns:
            The number of steps of the schedule that this replica skipped by rejoining.
        """
        found, before = self._outer_found, self.step
        assert found is not None
        if not (must or found.done() or before >= self._others_step):
            return 0
        with self._membership.ledger.count_wait(TAG):
            found.result()
        self._outer_found = None
        if self.views and self._donors_views.get(self.views[-1][0]) != self.views[-1][1]:
            # this replica alone completed its last exchange; the others repeated it without it
            self.views.pop()
            self.discarded += self._last_steps / len(self.fragments)
        self.rejoined.append(self.landed)
        unsent = []
        for fragment, (base, since) in zip(self.fragments, self._bases, strict=True):
            values = fragment.local_values()
            fragment.subtract_from(base.to(values.device), values)
            unsent.append((values, since))
        self._launch_joined(unsent)
        return self.step - before

    def _find_outer(self) -> None:
        """Fetch a member's outer state, replay missed landings, and become a member.

        This replica then takes part in the next exchange. If the member that provides the state
        fails, start over with another member.
        """
        membership, gone = self._membership, set[str]()
        while True:
            donor = membership.donor(gone)
            with membership.asking():
                if not self._take_snapshot(donor):
                    gone.add(donor.replica)
                    continue
                self._warming.join()
                # the snapshots of this replica's ranks may contain different numbers of landings
                there = self._replay(donor, max(membership.ranks.gather(self.landed)))
            while there and (later := membership.enter(self.landed)) is not None:
                with membership.asking():
                    there = self._replay(donor, later)
            if there:
                break
            gone.add(donor.replica)

    def _launch_joined(self, unsent: Sequence[tuple[Tensor, int]] = ()) -> None:
        """Set the local weights, and launch fragments at the same step as the other replicas.

        The local weights become the outer weights plus the updates of unsent inner steps, if any.

        Args:
            unsent: empty for a new replica. For a replica that rejoins, one pair per fragment: the
                outer gradient of the inner steps that it has not sent (fp32, shape (S,)), and the
                value of `inner_steps` before these steps.
        """
        self.launched = self.landed
        self._take_outer(self.launch_step(self.launched))
        for p, (values, since) in enumerate(unsent):
            fragment = self.fragments[p]
            local = fragment.global_copy.clone()
            numel = fragment.parameter_numel
            local[:numel] -= values[:numel].to(local.device)
            fragment.show(local)
            self._trained_since[p] = since
        while self.launch_step(self.launched) == self.step:
            p = self.launched % len(self.fragments)
            self.launch(p)
            if not self.settings.overlap_steps:
                self.land(p)
        self._enter(self._membership.view())

    def launch_step(self, flight: int) -> int:
        """Return the inner step after which exchange number `flight` is launched."""
        cycle, p = divmod(flight, len(self.fragments))
        return (cycle + 1) * self.settings.sync_every + self.schedule.offset(p)

    def _try(self, fetch: Callable[[], object]) -> bool:
        """Call `fetch`; return whether it succeeded on all ranks of this replica.

        A `ConnectionError` or `LookupError` means that it failed; other errors are not caught.
        """
        try:
            fetch()
            found = True
        except (ConnectionError, LookupError):
            found = False
        return self._membership.ranks.all(found)

    def _take_snapshot(self, member: Member) -> bool:
        """Fetch and load a member's outer state; return whether all ranks succeeded."""

        def fetch() -> None:
            snapshot = self._membership.transfer.fetch_snapshot(self._address(member))
            with self._outer_lock:
                for fragment, state in zip(self.fragments, snapshot["fragments"], strict=True):
                    fragment.load_state_dict(state)
                self.landed = self.launched = snapshot["landed"]
                self._donors_views = dict(snapshot["views"])

        return self._try(fetch)

    def _replay(self, donor: Member, least: int) -> bool:
        """Fetch the messages of exchanges that this replica has missed, and apply their landings.

        Args:
            donor: the member from which to fetch the messages.
            least: wait until the donor has completed all exchanges before this number, unless the
                members are waiting for more replicas.

        Returns:
            Whether all landings were applied; False if the donor is gone or no longer has the
            messages.

        Raises:
            RuntimeError: the other replicas are about to stop.
        """
        membership, messages = self._membership, list[dict[str, Any]]()

        def fetch(least: int) -> int:
            while True:
                messages[:] = membership.transfer.fetch_messages(self._address(donor), self.landed)
                done = max((m["flight"] + 1 for m in messages), default=self.landed)
                if done >= least or (not membership.ranks.rank and membership.waits):
                    return done
                time.sleep(_POLL_S)

        def fetch_on_first_rank() -> int:
            try:
                return fetch(least)
            except (ConnectionError, LookupError):
                return -1

        target = membership.ranks.share(fetch_on_first_rank)
        if target < 0 or not self._try(lambda: messages or fetch(target)):
            return False
        stops = [self._replay_one(m) for m in messages if m["flight"] < target]
        if any(membership.ranks.gather(any(stops))):
            raise RuntimeError(TOO_LATE)
        return True

    def _replay_one(self, message: dict[str, Any]) -> bool:
        """Apply the landing of one missed exchange; return whether any replica requested a stop."""
        p = message["flight"] % len(self.fragments)
        exchange, arrived = self._decoder(message, p)
        arrival = exchange.decode(arrived, self.fragments[p].global_copy.device)
        self._outer_step(p, arrival.mean)
        self._keep(message)
        return bool(arrival.summary.requests & STOP)

    def _take_outer(self, step: int) -> None:
        """Overwrite the local weights with the outer weights; continue the schedule from `step`.

        This discards all inner steps that have not been sent, and the residuals of error feedback.
        """
        self.step = step
        self._trained_since = [self.inner_steps] * len(self.fragments)
        for fragment in self.fragments:
            fragment.merge(mix=0.0)
            fragment.clear_residual()

    # -- methods that would need all replicas at the same time

    @override
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Restore the outer state from a checkpoint, without in-flight fragments.

        Call this before `begin`. `own`, a rank's own state, is not used: the local weights are set
        to the outer weights.
        """
        super().load_state_dict(shared, None)
        counts = [self.schedule.launches_until(p, self.step) for p in range(len(self.fragments))]
        self.launched = self.landed = sum(counts)
        self._take_outer(self.step)

    @override
    def shown(self) -> Sequence[Tensor] | None:
        if self._outer_found is not None:
            self._outer_found.result()  # wait, because `_find_outer` changes the outer weights
        return super().shown()

    @override
    def average_moved(self) -> None:
        if self._frozen.digests() != self._frozen_digests:
            raise RuntimeError(
                "A hook changed frozen parameters during the fit. Elastic replicas do not average"
                " these. Use `StreamingDiLoCoStrategy` or, if they may differ between replicas,"
                " register them as buffers instead."
            )

    @override
    def _frozen_at(self, p: int) -> Frozen:
        if (frozen := super()._frozen_at(p)) == NONE_FROZEN:
            return frozen
        names = self.fragments[p].fragment.parameters
        raise RuntimeError(
            f"The parameters {[names[i] for i in sorted(frozen.settling)]} were frozen during the"
            " fit. Elastic replicas do not support this, because a replica that joins later would"
            " not know about the change. Freeze them before `fit`, or use"
            " `StreamingDiLoCoStrategy`."
        )

    @override
    def _join(self, names: Sequence[str], offset: int) -> None:
        raise RuntimeError(
            f"The parameters {sorted(names)} became trainable during the fit. Elastic replicas do"
            " not support this, because a replica that joins later would not know about the change."
            " Make them trainable before `fit`, or use `StreamingDiLoCoStrategy`."
        )


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
