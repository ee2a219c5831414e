"""Streaming DiLoCo with replicas that join, leave and die, on a job's log (`elastic.log`).

Flight F exchanges fragment F mod P. All replicas share one schedule, and `step` is a replica's
position in it. A replica that a flight's commit lists lands as in `diloco.streaming`. Any other
replica takes the same outer step, and adds the change of the global copy to its local weights: its
outer gradient stays as it was, and counts in the fragment's next flight. The rest follows from
that:

- A replica that was stopped or cut off lands what it has missed, without training in between.
- A new replica begins with a state in the log, and does the same.
- If what it needs has been deleted, or is more than two cycles old, it continues from the newest
  state, and keeps the outer gradients that no commit has counted.
- If the job has ended, it takes the final weights from the log.
- A replica that left after SIGTERM may come back with its own state. It has another name in the
  log then, and is otherwise one that was stopped. It first lands what was due when it left.

In the mean, a replica's values are weighted by the inner steps that they contain, so the first
message of a new replica, which contains only zeros, has weight 0.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_commfree.comm.background import to_host
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.requests import STOP, Requests
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.messages import Message, startup_messages
from lightning_commfree.diloco.nonfinite import NONFINITE_VALUES
from lightning_commfree.diloco.outer import NONE_FROZEN, Frozen
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.elastic.lateness import Lateness
from lightning_commfree.elastic.log import MissedError, PostponedError
from lightning_commfree.elastic.transport import NOT_LISTED, StoreTransport

_log = logging.getLogger(__name__)
_NO_SLOT = -1
_IN_LOG = ("step", "paces", "pacer", "fragments")  # of the state that all replicas share
_MOST_LEFT_OUT = 3  # states in a row
_LATE = 4  # a replica whose messages have been too late so often begins when the others do


class ElasticDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo on one replica of an elastic job.

    Attributes:
        inner_steps: inner steps that it has taken; `step` is its position in the schedule.
        skipped: steps of the schedule that were skipped after the latest inner step.
        last_step: the step after which the fit ends; no steps are skipped beyond it.
        weight_per_step: weight of one inner step in a mean, such as its number of samples.
        ended: whether the job has ended without this replica, which now has the final weights.
        left_at: position in the log of a replica that left, from a checkpoint; None after `begin`.
        continues: whether this replica has continued from that position.
        postponed: whether it leaves with landings due, which come first when it is back.
        state_every: least number of flights between two states in the log, a multiple of the number
            of fragments.
        note: called with what happens, for a log of this replica's own. After a landing, the last
            argument is a function that returns a digest of the fragment's global copy; it makes the
            host wait for the device.
    """

    transport: StoreTransport

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        transport: StoreTransport,
        within: Channel | None = None,
        requests: Requests | None = None,
        state_cycles: int = 4,
        note: Callable[..., None] = lambda *_: None,
    ) -> None:
        assert settings.evaluate == "outer", "other weights need all replicas at the same time"
        self.inner_steps = self.skipped = 0
        self.weight_per_step, self.last_step = 1, math.inf
        self.ended = self.continues = self.postponed = self._left = False
        self.left_at: Mapping[str, Any] | None = None
        self.state_every, self.note = state_cycles * len(fragments), note
        self._log, self.ranks, self._slot = transport.log, transport.log.ranks, 0
        self._trained_since = [0] * len(fragments)  # `inner_steps` at the landing that counted last
        self._before: dict[int, Tensor] = {}  # global copies before an outer step
        self._late_flights = 0  # landings in a row that did not count its message
        self._sent: set[int] = set()  # fragments in flight for which this replica sent a message
        self._wait_for_copies: Callable[[], None] = lambda: None  # of the latest state
        self._left_out = 0  # states in a row
        self._lateness = Lateness(len(fragments), settings.overlap_steps)
        super().__init__(module, fragments, settings, transport, within, requests)
        self._frozen_digests = self._frozen.digests()

    # -- a fit

    @torch.no_grad()
    def begin(self, fingerprint: Mapping[str, str], max_replicas: int) -> int | None:
        """Create or join the job, with its newest state; return the slot, None if all are taken.

        If the job has `ended`, take its final weights; the slot is 0 then. A `ValueError` says that
        the job has other settings.
        """
        total = len(self.fragments)
        first = sum(self.schedule.launches_until(p, self.step) for p in range(total))
        self._log.begin(fingerprint, lambda: self._copied_state()(), first)
        left_at = self.left_at
        if self._log.end() < 0:
            if left_at:
                self.continues = self._log.take_over(left_at["name"], left_at["launched"])
            slot = self.ranks.first(lambda: self._enroll(max_replicas))
            if slot == _NO_SLOT:
                return None
            self._slot = slot
        self.left_at = None
        if left_at and self.continues:
            self._take_up(left_at)
        else:
            for fragment in self.fragments:
                fragment.clear_residual()
            self._continue_from(*self._log.newest_state(), keep=False)
        if not self.ended:
            self._log.start(self._log.launched)
        return self._slot

    def _enroll(self, max_replicas: int) -> int:
        """Return the slot that rank 0 has got, or `_NO_SLOT`."""
        member = self._log.enroll(max_replicas)
        return _NO_SLOT if member is None else member.slot

    @property
    def is_first(self) -> bool:
        """Whether this replica has the smallest slot in the latest commit that it has landed.

        Before the first landing, the smallest slot of all, which is always taken first.
        """
        if not self.transport.has_landed:
            return self._slot == 0
        return self.view.rank != NOT_LISTED and self._slot == min(self.view.members)

    @override
    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Refuse parameters that were unfrozen, then step as usual."""
        if names := self._frozen.unfrozen():
            raise RuntimeError(
                f"The parameters {sorted(names)} became trainable during the fit. Elastic replicas"
                " do not support this, because a replica that joins later would not know about the"
                " change. Make them trainable before `fit`, or use `StreamingDiLoCoStrategy`."
            )
        with super().stepping():
            yield

    @override
    def after_step(self) -> None:
        """Launch and land what is due, and skip steps if the others are ahead."""
        position = self.step + 1
        self.inner_steps += 1
        self._advance()
        while self._may_skip and self.ranks.first(self._is_behind):
            # what it has sent must land first: it may have counted
            if not self._sent and self.ranks.first(self._is_far_behind):
                self._continue_from(*self._log.newest_state(), keep=True)
            else:
                self.pacer.skip_step()
                self._advance()
        self.skipped = self.step - position
        self.note("at", self.inner_steps, self.step)

    @torch.no_grad()
    def land_postponed(self) -> None:
        """Land what was due when this replica left, if it continues; call it before a step."""
        if not self.continues:
            return
        before = self.step
        try:
            for p in self.schedule.landed_at(self.step):
                if p in self.flights:
                    self.land_due(p)
        except MissedError:
            self._continue_from(*self._log.newest_state(), keep=True)
        self.skipped = self.step - before
        self.note("begins")

    @property
    def _may_skip(self) -> bool:
        """Whether the fit goes on, so that steps may be skipped."""
        is_over = self.requests.stops or self.ended or self.postponed
        return self.step < self.last_step and not is_over

    def _is_behind(self) -> bool:
        """Whether the others have gone on without this replica; rank 0 only."""
        # once may be chance, and skipped steps are lost
        return self._log.is_behind(self.transport.follows or self._late_flights >= _LATE)

    def _is_far_behind(self) -> bool:
        """Whether the newest state is more than two cycles ahead; rank 0 only."""
        return self._log.is_far_behind(2 * len(self.fragments))

    def _advance(self) -> None:
        """Go on by a step of the schedule, or from the newest state if messages are gone."""
        try:
            super().after_step()
        except MissedError:
            self._continue_from(*self._log.newest_state(), keep=True)

    @override
    def launch(self, p: int) -> None:
        """Launch a fragment; send no message if its flight is already decided."""
        self._refuse_frozen(p)
        self.fragments[p].keep_residual()
        super().launch(p)
        transport = self.transport
        if not transport.follows:
            self._sent.add(p)
        self.note("launch", transport.flights[p], p, self.step, not transport.follows)

    @override
    def land_due(self, p: int) -> None:
        """Land a fragment, and store the state after it if it is time to."""
        before = self.schedule
        super().land_due(p)
        if self.schedule != before:
            self.note("pace", *self.schedule.paces[-1])
        flight = self.transport.flights[p]
        # not before the change of pace: who begins with the state does not make it
        if not self.postponed and self.view.rank == 0 and (flight + 1) % self.state_every == 0:
            self._write_state(flight)

    @override
    def land(self, p: int) -> None:
        """Land a fragment, and note how long training waited."""
        if self.postponed:  # landings keep their order
            return
        ledger = self.view.channel.ledger
        before_s = ledger.seconds_waited
        try:
            super().land(p)
        except PostponedError:
            self.postponed = True
            return
        if p in self._sent:
            self._sent.remove(p)
            self._lateness.landed(ledger.seconds_waited - before_s, time.monotonic())

    @override
    def outer_step(self, p: int, mean_gradient: Tensor, frozen: Frozen = NONE_FROZEN) -> None:
        """Keep the global copy if the commit does not list this replica, then step as usual."""
        if self.view.rank == NOT_LISTED:
            self._before[p] = self.fragments[p].global_copy.clone()
        super().outer_step(p, mean_gradient, frozen)

    @override
    def merge(self, p: int, abstained: bool, frozen: Frozen = NONE_FROZEN) -> None:
        """Merge as usual if listed; otherwise keep the outer gradient for the next flight."""
        fragment, listed = self.fragments[p], self.view.rank != NOT_LISTED
        before = self._before.pop(p, None)
        is_finite = listed or all(self.ranks.gather(bool(fragment.local_values().isfinite().all())))
        if not is_finite and self.settings.nonfinite == "raise":
            raise RuntimeError(
                f"This replica's values of fragment {p} are not finite ({NONFINITE_VALUES}) after"
                f" step {self.step}. The others continue without it. Lower the learning rate or"
                " check this replica's batches; with `nonfinite='abstain'` it would continue from"
                " the global copy."
            )
        is_late = not listed and not self.transport.abstained
        self._late_flights = self._late_flights + 1 if is_late else 0
        if p in self._sent and not self.transport.abstained:
            self._lateness.listed(listed)
        if not listed and is_finite:
            assert before is not None
            fragment.keep_outer_gradient(before, frozen)
            fragment.end_launch(counted=False)
        else:
            fragment.end_launch(counted=True)
            super().merge(p, abstained=not listed, frozen=frozen)
            self._trained_since[p] = self.inner_steps
        flight = self.transport.flights[p]
        self.note("land", flight, listed, fragment.digest)

    @override
    def weight(self, p: int) -> int:
        """Return the weight of this replica in a mean: its steps since the last counted landing."""
        return (self.inner_steps - self._trained_since[p]) * self.weight_per_step

    @property
    @override
    def is_alone(self) -> bool:
        return False  # another replica may follow, and gets only what was sent

    @override
    def finish(self) -> None:
        """Take part in the last round, or take the final weights if it is over; end the job."""
        last_step, total = self.step, len(self.fragments)
        self.postponed = False
        while not self.ended:
            for p in range(total):
                self._refuse_frozen(p)
            # the last round begins with fragment 0: skip to its next flight, as all replicas do
            self._log.launched = -(-self._log.launched // total) * total
            self._log.last_round = self._log.launched
            try:
                super().finish()
                break
            except MissedError:
                self._continue_from(*self._log.newest_state(), keep=True)
                while self.step < last_step and not self.ended:
                    self._advance()
        if self.ended:  # without this replica, which has the final weights from the log
            return
        for p, flight in self.transport.flights.items():
            self.note("final", flight, p, self.fragments[p].digest)
        self._trained_since = [self.inner_steps] * total
        # without being listed, this replica may be the only one that is left
        if self.view.rank in (0, NOT_LISTED):
            self._log.write_final_state(self._log.launched - 1, self._copied_state())

    @override
    def wait_in_flight(self) -> None:
        """Do nothing: no checkpoint contains messages, because the log keeps them."""

    @override
    def average_moved(self) -> None:
        """Raise a `RuntimeError` if a hook has changed frozen parameters; nothing is averaged."""
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

    def model_hash(self) -> str:
        """Hash the parameters' names, shapes and dtypes, and the values of frozen parameters.

        Collective within the replica, whose ranks may hold shards.
        """
        named = [(n, [*p.shape], str(p.dtype)) for n, p in self._module.named_parameters()]
        own = _hash(repr((named, self._frozen_digests)))
        return f"{_hash(repr(self.ranks.gather(own))):x}"

    @override
    def startup_messages(self, steps: int | None) -> list[Message]:
        # 2 replicas instead of the current number, which may change
        last_step = None if steps is None else self.step + steps
        return startup_messages(self._module, self.settings, self.schedule, 2, last_step)

    # -- states

    def leave(self, within_s: float) -> bool:
        """Leave the job after a step; from now on, `state_dict` has the position in the log.

        Return False if the store did not confirm all messages in time: this replica cannot come
        back then, except as a new one. Collective within the replica.
        """
        self._log.leave(within_s)
        self._log.say_leaving()
        self._left = self._log.is_stored()
        return self._left

    @override
    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the outer state and this replica's own state.

        The latter has a position in the log only if this replica has left: that of one that goes
        on is out of date with its next message, and steps would count twice.
        """
        shared, own = super().state_dict()
        position = {
            "name": self._log.name,
            "launched": self._log.launched,
            "landed": self.landed,
            "sent": sorted(self._sent),
            "residuals_before": [fragment.residual_before for fragment in self.fragments],
            "inner_steps": self.inner_steps,
            "trained_since": self._trained_since,
            "late_flights": self._late_flights,
            "follows": self.transport.follows,
        }
        return shared, {**own, "elastic": position if self._left else None}

    @override
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Restore the state from a checkpoint, before `begin`, which decides whether to use `own`.

        If `own` has no position in the log, the local weights become the outer weights.
        """
        self.left_at = own and own.get("elastic")
        super().load_state_dict(shared, own if self.left_at else None)

    def _take_up(self, left_at: Mapping[str, Any]) -> None:
        """Continue as if this replica had only been stopped since it left."""
        self.landed, self._sent = left_at["landed"], set(left_at["sent"])
        self.inner_steps = left_at["inner_steps"]
        self._trained_since = [*left_at["trained_since"]]
        self._late_flights = left_at["late_flights"]
        for fragment, before in zip(self.fragments, left_at["residuals_before"], strict=True):
            fragment.residual_before = before
        self.note("renamed", left_at["launched"], self._log.name)
        self._log.continue_at(self.landed)
        total = len(self.fragments)
        for flight in range(self.landed, left_at["launched"]):
            self.flights[flight % total] = self.transport.follow(flight % total)
        self.transport.follows = left_at["follows"]

    def _copied_state(self) -> Callable[[], bytes]:
        """Start to copy this rank's outer state to the host, for the log.

        Return a function that waits for it and returns it as bytes; any thread may call that. On
        CUDA, the copies run on the side stream. Messages are decoded there, too, so the next outer
        step of each fragment comes after them.
        """
        shared, _ = super().state_dict()
        state = {name: shared[name] for name in _IN_LOG}
        waits: list[Callable[[], None]] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            host, wait = to_host(leaf)
            waits.append(wait)
            return host.clone() if host is leaf else host

        on_device = [t for t in pytree.tree_leaves(state) if isinstance(t, Tensor) and t.is_cuda]
        staging = self.transport.background.staging
        with staging.beside_training(on_device) if on_device else nullcontext():
            state = pytree.tree_map(copied, state)

        def wait_for_copies() -> None:
            for wait in waits:
                wait()

        def saved() -> bytes:
            wait_for_copies()
            file = io.BytesIO()
            torch.save(state, file)
            return file.getvalue()

        self._wait_for_copies = wait_for_copies
        return saved

    def _write_state(self, flight: int) -> None:
        """Store the outer state after a flight, and delete what no replica needs any more.

        A state is several times as large as all messages of its cycles. If the link has not carried
        the one before, this one is left out.
        """
        if self._log.is_storing():
            self._left_out += 1
            if self._left_out == _MOST_LEFT_OUT:
                _log.warning(
                    "Storing the outer state takes more than %d times as long as the time between"
                    " two states. Until the next one is stored, replicas that join read all"
                    " messages since the last. Use a faster link to the store, or raise"
                    " `sync_every`.",
                    _MOST_LEFT_OUT,
                )
            return
        if self._left_out < _MOST_LEFT_OUT:  # otherwise it has been said
            self._left_out = 0
        self._log.write_state(flight, self._copied_state(), self.state_every)

    def _continue_from(self, flight: int, state: bytes, keep: bool) -> None:
        """Continue as if `flight` had just landed; `keep`: with this replica's outer gradients."""
        self.ended = self._log.end() == flight + 1
        self.note("state", flight, self.inner_steps)
        self._wait_for_copies()
        before = [fragment.global_copy.clone() for fragment in self.fragments]
        landed = [p for p in self.flights if self.transport.flights[p] <= flight]  # by the others
        # their outer gradients are in a mean, and must not count again
        counted = [p for p in landed if self._log.is_listed(self.transport.flights[p])]
        for p in landed:
            self.fragments[p].end_launch(counted=p in counted)
        saved: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
        for p, (fragment, one) in enumerate(zip(self.fragments, saved["fragments"], strict=True)):
            fragment.load_state_dict(one)
            if not keep or self.ended:
                fragment.merge(mix=0.0)
            elif p in counted:
                fragment.merge(self.settings.mix)
                self._trained_since[p] = self.inner_steps
            else:
                fragment.keep_outer_gradient(before[p])
        self.step = saved["step"]
        self.load_paces(saved)
        self.flights.clear()
        self._sent.clear()
        self._log.continue_at(flight + 1)
        self.transport.follows = True
        self.landed = flight + 1
        if self.ended:
            self.requests.incoming(STOP)
            return
        total = len(self.fragments)
        launched = sum(self.schedule.launches_until(q, self.step) for q in range(total))
        for other in range(flight + 1, launched):  # in flight at that step
            self.flights[other % total] = self.transport.follow(other % total)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")  # fits into an int64
