"""Streaming DiLoCo with replicas that join, leave and die.

The algorithm is the same as in `streaming`; only the exchanges differ. They are numbered in launch
order (`comm.membership`), and each runs on a background thread:

1. The members agree on the view of the exchange.
2. The outer gradient, which is kept in fp32 until the exchange has completed, is encoded for that
   view and exchanged. If a member dies in the meantime, this starts again at 1. If another member
   has already completed the exchange, the messages are fetched from it instead.
3. The messages, still encoded, are kept for a few cycles.

A replica that joins takes the outer state from a member (`snapshot`) and replays the landings that
it has missed from the kept messages. It then takes part from the next launch on, without the inner
steps before that launch. The members lose no time.

A replica that was stopped or cut off for so long that the others went on without it joins in the
same way, but keeps its inner optimizer and the inner steps that it has not sent yet: it adds the
difference between its local and its outer weights to the new outer weights. It trains meanwhile.

A replica's values count in proportion to its own steps since the fragment's last landing on it, or
since it joined. So a new replica's first message, which contains only zeros, has no weight.

*By time.* All replicas share one schedule, and `step` is their place in it. Normally, every replica
takes every step. By time (`sync="time"`), only the fastest replica does, and it tells the others
when it launches a flight. After its current step, a slower replica then advances to that place in
the schedule without training, launches, and continues from there. So no replica waits longer than
one step of another, and given the steps that each has taken, the result is exact.
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
from lightning_commfree.comm.membership import (
    TOO_LATE,
    ElasticMembership,
    LeftBehindError,
    Member,
)
from lightning_commfree.diloco.codec import Codec
from lightning_commfree.diloco.exchange import (
    MAX_WEIGHT,
    TAG,
    Decoding,
    Flight,
    FragmentExchange,
    Header,
    cheaper_exchange,
)
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.messages import Message, startup_messages
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.streaming import StreamingDiLoCo

T = TypeVar("T")
_log = logging.getLogger(__name__)

_POLL_S = 0.02  # how often a joiner asks a member for new messages
_KEPT_CYCLES = 2  # number of cycles whose messages are kept
_KEPT_CYCLES_FOR_JOINERS = 8  # while a replica is joining
_LATEST_VIEWS = 100  # that a snapshot lists
_MAX_FAILURES = 5  # maximum number of failures of an exchange in views of the same members


class Delivery(NamedTuple):
    """The result of a flight: its messages, and the exchange that decodes them."""

    exchange: FragmentExchange
    arrived: Tensor


class ElasticDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo on a replica of an elastic job.

    Args:
        module: as in `StreamingDiLoCo`, like all arguments.
        fragments: as above.
        settings: as above; `evaluate` must be "outer".
        membership: this replica's part in the job, not yet started.
        within: as above.

    Attributes:
        launched: number of flights that the replicas have launched.
        landed: number of flights that have landed here, in the order of their launches.
        joined: the flight with which this replica joined the job; None for a founder.
        rejoined: the flights with which it joined again.
        may_rejoin: whether it joins again if the others have gone on without it; set it only if
            this replica has a single rank. There must be at most one fragment in flight at a time.
        discarded: inner steps that were lost then, in proportion to the fragments that lost them.
        inner_steps: number of inner steps that this replica has taken itself; `step` is its
            place in the schedule, which is the same on all replicas at a launch.
        skipped: number of steps of the schedule that were skipped after the latest inner step.
        last_step: the step after which the fit ends. A replica skips no steps beyond it.
        views: flight and slots of each view in which this replica took part.
        weight_per_step: weight of an inner step, such as its number of samples.
    """

    _membership: ElasticMembership

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        membership: ElasticMembership,
        within: Channel | None = None,
    ) -> None:
        assert settings.evaluate == "outer", "other weights need all replicas at the same time"
        ledger = membership.ledger
        self._thread, self._inline = Background(ledger), _Inline(ledger)
        self._outer_lock = threading.Lock()  # the state server reads the outer state
        self._kept: dict[int, dict[str, Any]] = {}  # messages, by flight
        self._deliveries: dict[int, Pending[Delivery]] = {}  # by fragment
        self._trained_since = [0] * len(fragments)  # own steps at a fragment's last landing
        self.launched = self.landed = self.inner_steps = self.skipped = 0
        self.views: list[tuple[int, tuple[int, ...]]] = []
        self.weight_per_step, self.last_step = 1, math.inf
        self.joined: int | None = None
        self.rejoined: list[int] = []
        self.may_rejoin, self.discarded = False, 0.0
        self._sent = -1  # the latest flight of which other members may have this replica's values
        self._outer_found: Future[None] | None = None  # of a replica that joins again
        # by fragment: the weights to which its unsent steps were added, and how many were before
        self._bases: list[tuple[Tensor, int]] = []
        self._others_step = 0
        self._landed_steps = self._last_steps = 0  # own steps in the latest landing
        self._donors_views: dict[int, tuple[int, ...]] = {}  # members by flight
        super().__init__(module, fragments, settings, membership, within)
        self._frozen_digests = self._frozen.digests()
        membership.transfer.serve(self.snapshot, self.messages)

    @override
    def _warm_up(self) -> None:
        # a joiner fetches the state meanwhile
        self._warming = threading.Thread(target=super()._warm_up, name="warm-up", daemon=True)
        self._warming.start()

    # -- a fit

    def begin(self, fingerprint: Mapping[str, str]) -> bool:
        """Found the job or join it; return whether this replica has joined.

        Blocks until `min_replicas` founders are there, or until the other replicas' next launch.
        Afterwards, the local weights are the outer weights of all replicas, and `step` is the step
        that they have reached.

        Args:
            fingerprint: settings and model, which must be the same on all replicas.

        Raises:
            RuntimeError: the job has ended, all slots are taken, or no replica is left.
            ValueError: the other replicas have different settings or another model.
        """
        membership = self._membership
        while membership.start(fingerprint, self.step, self.launched):
            self._enter(membership.view())
            first = membership.view_members[0]
            if self.view.rank:
                if not self._take_snapshot(first):
                    continue  # that member is gone: begin again
                self._take_outer(self.step)
            self._warming.join()
            return False
        self._join_job()
        return True

    @override
    def after_step(self, stop: bool = False) -> bool:
        self.inner_steps += 1
        if self.is_rejoining:
            self.step += 1
            self.skipped = self._rejoin()
            return False
        try:
            stops, self.skipped = super().after_step(stop), 0
        except LeftBehindError:
            steps_in_flight = self.settings.overlap_steps * len(self.fragments)
            # the only fragment in flight is the one that the others have landed without this one
            if not (self.may_rejoin and 0 < steps_in_flight < self.settings.sync_every):
                raise
            self._begin_to_rejoin()
            stops, self.skipped = False, self._rejoin()
        while self._is_behind and not stops:
            stops = super().after_step(stop)
            self.skipped += 1
        return stops

    @property
    def _is_behind(self) -> bool:
        """Whether, by time, another replica has already launched this replica's next flight."""
        membership = self._membership
        by_time = membership.by_time and self.step < self.last_step
        return by_time and membership.is_launched(self.launched)

    @override
    def finish(self, stop: bool = False) -> bool:
        if self.is_rejoining:
            self._rejoin(must=True)
        self._membership.end()
        return super().finish(stop)

    def drain(self, seconds: float) -> None:
        """Wait until the exchanges in flight have completed, or for `seconds`.

        Call it before this replica leaves the job, so that the others have its values.
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

    # -- flights

    @override
    def _launch(
        self,
        p: int,
        values: Tensor,
        header: Header,
        residual: Tensor | None,
        tag: str,
        decoding: Decoding,
    ) -> Flight:
        del decoding  # decoded at the landing, because a failed exchange is repeated
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
        """Exchange values in the view of a flight, and in later ones if members are lost."""
        if values.is_cuda:
            torch.cuda.set_device(values.device)  # for this thread
        failures: list[tuple[int, ...]] = []
        while True:
            found = self._membership.agree(flight, header.step)
            if isinstance(found, Member):
                message = self._fetch(found, flight)
                if message is None:  # that member is gone too
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
                "arrived": delivery.arrived,
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
        # if the others have continued without this replica, the landing finds that out as well
        with suppress(LeftBehindError):
            super().wait_in_flight()

    @override
    def _messages_in_flight(self) -> dict[int, Tensor]:
        return {}  # not needed: a new job starts with outer weights, a joiner asks a member

    @override
    def _weight(self, p: int) -> int:
        steps = self.inner_steps - self._trained_since[p]
        return min(steps * self.weight_per_step, MAX_WEIGHT)

    @override
    def _outer_step(self, p: int, mean: Tensor) -> None:
        with self._outer_lock:
            super()._outer_step(p, mean)
            self.landed += 1
        self._landed_steps = self.inner_steps - self._trained_since[p]
        self._trained_since[p] = self.inner_steps

    @override
    def _take_mean(self, p: int, mean: Tensor | None) -> None:
        with self._outer_lock:
            super()._take_mean(p, mean)
            self.landed += 1
        self._trained_since[p] = self.inner_steps

    def _codec(self, is_last: bool) -> Codec:
        """Return the codec, without error feedback if `is_last`."""
        return self._last_codec if is_last else self.codec

    def _sizes(self, p: int) -> tuple[int, int]:
        fragment = self.fragments[p]
        return fragment.parameter_numel, fragment.shard_numel - fragment.parameter_numel

    @property
    def has_landed(self) -> bool:
        """Whether a fragment has landed after the latest step."""
        return self.inner_steps in self._trained_since

    @property
    def slot(self) -> int:
        """This replica's share of the data, and its place in a view; valid after `begin`."""
        return self._membership.record.slot

    def model_hash(self) -> str:
        """Return a hash of the model's names, shapes and dtypes, and of its frozen parameters."""
        named = [(n, [*p.shape], str(p.dtype)) for n, p in self._module.named_parameters()]
        text = repr((named, self._frozen_digests))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @override
    def startup_messages(self, steps: int | None) -> list[Message]:
        # the current number of replicas does not matter
        last_step = None if steps is None else self.step + steps
        return startup_messages(self._module, self.settings, self.schedule, 2, last_step)

    # -- data for other replicas

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the outer state, with the number of flights that have landed in it."""
        with self._outer_lock:
            states = [fragment.state_dict() for fragment in self.fragments]
            views = self.views[-_LATEST_VIEWS:]
            return copy.deepcopy({"landed": self.landed, "fragments": states, "views": views})

    def messages(self, first: int) -> list[dict[str, Any]]:
        """Return the messages of all completed flights from number `first` on.

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
        """Return the message of a flight that `member` has completed, or None if it has lost it."""
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
        """Return a fetched message together with an exchange that decodes it."""
        members, slot = tuple(message["members"]), self._membership.record.slot
        channel = Channel([0], 0, self._membership.ledger)
        channel.rank = members.index(slot) if slot in members else -1
        route = Route(View(-1, members, channel), message["two_phase"])
        codec = self._codec(not message["corrects"])
        exchange = FragmentExchange(route, codec, *self._sizes(p), self._inline)
        return Delivery(exchange, message["arrived"])

    # -- joining

    def _join_job(self) -> None:
        """Take a member's state, replay the landings since then, and launch with the others."""
        self._find_outer()
        self.joined = self.landed
        self._launch_joined()

    @property
    def is_rejoining(self) -> bool:
        """Whether this replica is no member, and will join again."""
        return self._outer_found is not None

    def _begin_to_rejoin(self) -> None:
        self._bases = []
        for p, fragment in enumerate(self.fragments):
            base, since = fragment.global_copy.clone(), self._trained_since[p]
            if p in self.flights and self._sent == self.launched - 1:
                # some of the others may have these steps
                self.discarded += (self.inner_steps - since) / len(self.fragments)
                base, since = fragment.local_values(), self.inner_steps
            self._bases.append((base, since))
        self.flights.clear()
        self._deliveries.clear()
        self._thread.close()  # it would repeat its error
        self._thread = Background(self._membership.ledger)
        self._others_step = self._membership.others_step
        self._last_steps = self._landed_steps  # replayed landings change it
        executor = ThreadPoolExecutor(1, "rejoin")
        self._outer_found = executor.submit(self._find_outer)
        executor.shutdown(wait=False)

    def _rejoin(self, must: bool = False) -> int:
        """Join again if the view is open; return how many steps of the schedule this skips.

        Wait for it if the others may not be further in the schedule, or if this replica `must`.
        """
        found, before = self._outer_found, self.step
        assert found is not None
        if not (must or found.done() or before >= self._others_step):
            return 0
        with self._membership.ledger.count_wait(TAG):
            found.result()
        self._outer_found = None
        if self.views and self._donors_views.get(self.views[-1][0]) != self.views[-1][1]:
            # only this replica has received everything before it was stopped
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
        """Take a member's outer state, and enter the view of the next flight."""
        membership, gone = self._membership, set[str]()
        while True:
            donor = membership.donor(gone)
            with membership.asking():
                if not self._take_snapshot(donor):
                    gone.add(donor.replica)
                    continue
                self._warming.join()
                # the ranks of a replica may have received snapshots from different flights
                there = self._replay(donor, max(membership.ranks.gather(self.landed)))
            while there and (later := membership.enter(self.landed)) is not None:
                with membership.asking():
                    there = self._replay(donor, later)
            if there:
                break
            gone.add(donor.replica)

    def _launch_joined(self, unsent: Sequence[tuple[Tensor, int]] = ()) -> None:
        """Take the outer weights and launch with the others.

        Args:
            unsent: by fragment, an outer gradient that was not sent, and the number of inner steps
                before it.
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
            self.launch(p, stop=False)
            if not self.settings.overlap_steps:
                self.land(p)
        self._enter(self._membership.view())

    def launch_step(self, flight: int) -> int:
        """Return the inner step after which a flight is launched."""
        cycle, p = divmod(flight, len(self.fragments))
        return (cycle + 1) * self.settings.sync_every + self.schedule.offset(p)

    def _try(self, fetch: Callable[[], object]) -> bool:
        """Call `fetch`; return whether it succeeded on all ranks of this replica."""
        try:
            fetch()
            found = True
        except (ConnectionError, LookupError):
            found = False
        return self._membership.ranks.all(found)

    def _take_snapshot(self, member: Member) -> bool:
        """Load a member's outer state; return whether all ranks of this replica succeeded."""

        def fetch() -> None:
            snapshot = self._membership.transfer.fetch_snapshot(self._address(member))
            with self._outer_lock:
                for fragment, state in zip(self.fragments, snapshot["fragments"], strict=True):
                    fragment.load_state_dict(state)
                self.landed = self.launched = snapshot["landed"]
                self._donors_views = dict(snapshot["views"])

        return self._try(fetch)

    def _replay(self, donor: Member, least: int) -> bool:
        """Apply all landings that this replica has missed.

        Wait until flights before number `least` have landed, unless the members are waiting for
        more replicas. Returns whether the donor had the messages.

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
        """Apply a landing; return whether any replica requested a stop."""
        p = message["flight"] % len(self.fragments)
        exchange, arrived = self._decoder(message, p)
        arrival = exchange.decode(arrived, self.fragments[p].global_copy.device)()
        self._outer_step(p, arrival.mean)
        self._keep(message)
        return arrival.stop

    def _take_outer(self, step: int) -> None:
        """Take the outer weights as local weights, and continue the schedule from `step`."""
        self.step = step
        self._trained_since = [self.inner_steps] * len(self.fragments)
        for fragment in self.fragments:
            fragment.merge(mix=0.0)
            fragment.clear_residual()

    # -- methods that would need all replicas at the same time

    @override
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continue from a saved shared state, without in-flight fragments; `own` is not used.

        Call it before `begin`.
        """
        super().load_state_dict(shared, None)
        counts = [self.schedule.launches_until(p, self.step) for p in range(len(self.fragments))]
        self.launched = self.landed = sum(counts)
        self._take_outer(self.step)

    @override
    def shown(self) -> Sequence[Tensor] | None:
        if self._outer_found is not None:
            self._outer_found.result()  # it changes the outer weights
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
    def _join(self, names: Sequence[str], offset: int) -> None:
        raise RuntimeError(
            f"The parameters {sorted(names)} became trainable during the fit. Elastic replicas do"
            " not support this, because a replica that joins later would not know about the change."
            " Make them trainable before `fit`, or use `StreamingDiLoCoStrategy`."
        )


class _Inline(Background):
    """Runs tasks in the thread that waits for them: all elastic exchanges share one thread."""

    @override
    def submit(
        self,
        task: Callable[[], T],
        tag: str,
        staged: Callable[[], object] | None = None,
        device: torch.device | None = None,
    ) -> Pending[T]:
        return Pending(task)
