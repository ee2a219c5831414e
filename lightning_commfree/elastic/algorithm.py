"""Streaming DiLoCo with replicas that join, leave and die.

The algorithm is the same as in `diloco.streaming`; only the exchanges of fragments differ
(`transport`): if a member dies, they are repeated among the others, and their messages are kept for
a few cycles.

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
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.requests import STOP, Requests
from lightning_commfree.diloco.exchange import TAG
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.messages import Message, startup_messages
from lightning_commfree.diloco.outer import NONE_FROZEN
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.elastic.membership import (
    TOO_LATE,
    ElasticMembership,
    LeftBehindError,
    Member,
)
from lightning_commfree.elastic.transport import POLL_S, ElasticTransport

_LATEST_VIEWS = 100  # number of views that a snapshot lists


class ElasticDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo on one replica of an elastic job, in which replicas join, leave and die.

    Args:
        module: the model, as in `StreamingDiLoCo`.
        fragments: a partition of the model's trainable parameters.
        settings: settings of the fit; `evaluate` must be "outer".
        membership: this replica's membership in the job, not yet started.
        within: channel between the ranks of this replica, as in `StreamingDiLoCo`.

    Attributes:
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
        weight_per_step: weight of one inner step in a mean, such as its number of samples.
    """

    transport: ElasticTransport

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
        self._membership = membership
        self._trained_since = [0] * len(fragments)  # `inner_steps` at each last landing
        self.inner_steps = self.skipped = 0
        self.weight_per_step, self.last_step = 1, math.inf
        self.joined: int | None = None
        self.rejoined: list[int] = []
        self.may_rejoin, self.discarded = False, 0.0
        self._outer_found: Future[None] | None = None  # `_find_outer`, while this replica rejoins
        # by fragment: the weights before its unsent inner steps, and `inner_steps` at that time
        self._bases: list[tuple[Tensor, int]] = []
        self._others_step = 0
        self._landed_steps = 0  # inner steps in the latest landing
        self._donors_views: dict[int, tuple[int, ...]] = {}  # member slots by exchange
        transport = ElasticTransport(membership)
        super().__init__(module, fragments, settings, transport, within, requests)
        self._frozen_digests = self._frozen.digests()
        # on a thread, because a joiner fetches the state at the same time
        self._warming = threading.Thread(target=self.warm_up, name="warm-up", daemon=True)
        self._warming.start()
        membership.transfer.serve(self.snapshot, self.transport.messages)

    @property
    def views(self) -> list[tuple[int, tuple[int, ...]]]:
        """One pair per exchange in which this replica took part, as in `ElasticTransport`."""
        return self.transport.views

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
        while membership.start(fingerprint, self.step, self.transport.launched):
            self.transport.enter(membership.view())
            first = membership.view_members[0]
            if self.view.rank:
                if not self._take_snapshot(first):
                    continue  # the first member is gone, so start again
                self._take_outer(self.step)
            self._warming.join()
            return False
        self._join_job()
        return True

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        if names := self._frozen.unfrozen():
            raise RuntimeError(
                f"The parameters {sorted(names)} became trainable during the fit. Elastic replicas"
                " do not support this, because a replica that joins later would not know about the"
                " change. Make them trainable before `fit`, or use `StreamingDiLoCoStrategy`."
            )
        with super().stepping():
            yield

    @override
    def launch(self, p: int) -> None:
        self._refuse_frozen(p)
        super().launch(p)

    @override
    def land(self, p: int) -> None:
        super().land(p)
        self._landed_steps = self.inner_steps - self._trained_since[p]
        self._trained_since[p] = self.inner_steps

    @override
    def weight(self, p: int) -> int:
        return (self.inner_steps - self._trained_since[p]) * self.weight_per_step

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
        return by_time and membership.is_launched(self.transport.launched)

    @override
    def finish(self) -> None:
        if self.is_rejoining:
            self._rejoin(must=True)
        self._membership.end()
        for p in range(len(self.fragments)):
            self._refuse_frozen(p)
        super().finish()
        self._trained_since = [self.inner_steps] * len(self.fragments)

    def drain(self, seconds: float) -> None:
        """Wait for in-flight exchanges to complete, for at most `seconds`.

        Call this before this replica leaves the job, so that the other replicas get its values.
        """

        def wait() -> None:
            with suppress(RuntimeError):
                for flight in list(self.flights.values()):
                    flight.pending.wait()

        waiting = threading.Thread(target=wait, name="drain", daemon=True)
        waiting.start()
        waiting.join(seconds)

    @override
    def wait_in_flight(self) -> None:
        # if the others have continued without this replica, the landing raises this error again
        with suppress(LeftBehindError):
            super().wait_in_flight()

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
        with self.outer_lock:
            states = [fragment.state_dict() for fragment in self.fragments]
            views = self.views[-_LATEST_VIEWS:]
            return copy.deepcopy({"landed": self.landed, "fragments": states, "views": views})

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
            if p in self.flights and self.transport.sent == self.transport.launched - 1:
                # other replicas may have received these steps, so they cannot be sent again
                self.discarded += (self.inner_steps - since) / len(self.fragments)
                base, since = fragment.local_values(), self.inner_steps
            self._bases.append((base, since))
        self.flights.clear()
        self.transport.reset()
        self._others_step = self._membership.others_step
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
            self.discarded += self._landed_steps / len(self.fragments)
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
        self.transport.launched = self.landed
        self._take_outer(self.launch_step(self.landed))
        for p, (values, since) in enumerate(unsent):
            fragment = self.fragments[p]
            local = fragment.global_copy.clone()
            numel = fragment.parameter_numel
            local[:numel] -= values[:numel].to(local.device)
            fragment.show(local)
            self._trained_since[p] = since
        while self.launch_step(self.transport.launched) == self.step:
            p = self.transport.launched % len(self.fragments)
            self.launch(p)
            if not self.settings.overlap_steps:
                self.land(p)
        self.transport.enter(self._membership.view())

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
            address = self.transport.address(member)
            snapshot = self._membership.transfer.fetch_snapshot(address)
            with self.outer_lock:
                for fragment, state in zip(self.fragments, snapshot["fragments"], strict=True):
                    fragment.load_state_dict(state)
                self.landed = self.transport.launched = snapshot["landed"]
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
        address = self.transport.address(donor)

        def fetch(least: int) -> int:
            while True:
                messages[:] = membership.transfer.fetch_messages(address, self.landed)
                done = max((m["flight"] + 1 for m in messages), default=self.landed)
                if done >= least or (not membership.ranks.rank and membership.waits):
                    return done
                time.sleep(POLL_S)

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
        delivery = self.transport.delivery(message, p)
        arrival = delivery.decode(self.fragments[p].global_copy.device, None)
        self.outer_step(p, arrival.mean)
        self.transport.keep(message)
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
        self.transport.launched = self.landed = sum(counts)
        self._take_outer(self.step)

    @override
    def shown(self, what: str) -> Sequence[Tensor] | None:
        if self._outer_found is not None:
            self._outer_found.result()  # wait, because `_find_outer` changes the outer weights
        return super().shown(what)

    @override
    def average_moved(self) -> None:
        if self._frozen.digests() != self._frozen_digests:
            raise RuntimeError(
                "A hook changed frozen parameters during the fit. Elastic replicas do not average"
                " these. Use `StreamingDiLoCoStrategy` or, if they may differ between replicas,"
                " register them as buffers instead."
            )

    def _refuse_frozen(self, p: int) -> None:
        """Raise a `RuntimeError` if any of a fragment's parameters are frozen."""
        if (frozen := self._frozen_at(p)) == NONE_FROZEN:
            return
        names = self.fragments[p].fragment.parameters
        raise RuntimeError(
            f"The parameters {[names[i] for i in sorted(frozen.settling)]} were frozen during the"
            " fit. Elastic replicas do not support this, because a replica that joins later would"
            " not know about the change. Freeze them before `fit`, or use"
            " `StreamingDiLoCoStrategy`."
        )
