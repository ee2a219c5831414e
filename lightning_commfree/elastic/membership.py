"""Membership of an elastic job, in which replicas join, leave and die.

The members exchange values repeatedly. Exchanges are numbered from 0 in launch order, which is the
same on all members; the code calls a numbered exchange a *flight*. Before each exchange, every
member requests a *quorum* from the *rendezvous*, a service that tracks which replicas are alive.
Once all live members have requested it, the rendezvous sends the same response to all of them: the
`Member` records of all replicas in the quorum. Every decision depends only on that response, so all
members make the same decisions without further messages:

- *Creating a job.* If no replica is a member yet, the replicas that restored the latest checkpoint
  create the job and become its first members, the *founders*.
- *Next view.* A *view* is the group of members that take part in an exchange. It consists of the
  members, which have completed all earlier exchanges, and of joiners that have caught up. Members
  do not wait for a joiner that is behind.
- *After a failure.* If a member dies, the exchange fails, possibly on some members only. If some
  members have completed it, the others fetch its messages from one of them. Otherwise, all members
  repeat it in a new view without the dead member.
- *No split brain.* A restarted rendezvous has forgotten the members and may form a quorum of any
  subset of them. So a view must contain more than half of the members of the previous view. A
  smaller view is allowed only if the quorum's number is the next in sequence: in that case, the
  rendezvous has not restarted, and it knows that all missing members are dead.
- *End of a process.* When a member's process ends, the kernel of its machine refuses connections to
  the member's store. When the first living member of the view notices this, it requests a quorum on
  that member's behalf, with status `DEAD`, so that the others do not wait for its heartbeat to
  expire. A member that is declared dead by mistake sees this record in the response. Because dead
  members do not count as present, a member is declared dead only while the dead ones are a minority
  of the view. The rendezvous waits for all replicas of the last quorum, so the first member also
  requests the following quorums on behalf of the dead member, and of members that have left.
- *Rejoining.* A member that was suspended or cut off from the network finds that the others have
  continued without it. It may rejoin in its previous slot.
- *Too few members.* With fewer than `min_replicas` replicas, the members wait. If some members are
  known to be dead, the remaining ones then count as the previous view.

Members request quorums on a background thread, and training waits for the response only when it
needs the result of the exchange. Two interfaces allow other implementations: `Rendezvous`, and
`StateTransfer`, which sends state to joiners.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.sockets import CloseOnFork
from lightning_commfree.elastic.member_watch import MemberWatch
from lightning_commfree.elastic.replica_ranks import ReplicaRanks

_log = logging.getLogger(__name__)

NEW = "new"  # wants to create the job, or to join it
JOINING = "joining"  # is fetching state, and is not in a view yet
MEMBER = "member"
ENDING = "ending"  # a member that has begun the last exchanges of its fit: no replica may join
LEAVING = "leaving"
FINISHED = "finished"  # leaving because its fit has ended
DEAD = "dead"  # its process has ended; another member requests the quorum on its behalf
_GONE = (LEAVING, FINISHED)
ABSENT = (*_GONE, DEAD)  # takes part in no more exchanges


class Member(NamedTuple):
    """A replica's record, which it sends to the other replicas with every quorum request.

    All fields are JSON values.
    """

    replica: str  # unique name of this process, not reused after a restart
    status: str = NEW
    flights: int = 0  # number of exchanges that it has completed; -1 while a joiner is not ready
    slot: int = -1  # index of its data share, and its position in views; -1 if not a member yet
    view: str = ""  # name of the last view that it was in; "" if none
    view_size: int = 0  # number of members of that view
    number: int = 0  # number of the last quorum that it was in; if `NEW`, of the first one
    broken: bool = False  # an exchange in that view has failed, so the view's channel is unusable
    asked: int = 0  # number of quorums that this process has requested; makes each quorum unique
    settings: Mapping[str, str] = {}  # settings and model, which must be the same on all replicas
    step: int = 0  # position in the schedule that all replicas share, in inner steps
    store: str = ""  # "host:port" of its TCPStore, through which the members of a view connect
    states: tuple[str, ...] = ()  # addresses of its ranks' state servers, in rank order


class Quorum(NamedTuple):
    """Response of the rendezvous to a quorum request, the same for all replicas in the quorum."""

    number: int  # from 1; increases when the replicas change; a restarted rendezvous starts over
    members: tuple[Member, ...]  # the replicas that requested the quorum, in order of `replica`


class Rendezvous(Protocol):
    """Interface to the service that tracks which replicas are alive."""

    def quorum(self, mine: Member) -> Quorum:
        """Request a quorum for the replica `mine.replica`, and block until it is complete.

        A quorum is complete once all replicas of the previous quorum that still send heartbeats
        have requested a new one. A replica sends heartbeats from its first call until `close`, even
        while it waits in this method. If a second thread requests a quorum while the first one
        waits, the later record replaces the earlier one, and both threads get the same quorum.
        While the service is unreachable, the call keeps retrying.

        Raises:
            RuntimeError: no such service is running at the address, or the service was unreachable
                or did not respond for longer than the job's timeout. The message says which.
        """

    def heartbeats(self) -> Mapping[str, float]:
        """Return the seconds since each replica's last heartbeat, by replica name.

        Replicas that have sent no heartbeat are omitted.

        Raises:
            ConnectionError: the service does not respond.
        """

    def close(self) -> None:
        """Stop sending heartbeats; a pending `quorum` in another thread raises `RuntimeError`."""


class StateTransfer(Protocol):
    """Interface for serving one rank's state to joining replicas, and for fetching such state.

    A snapshot is a (nested) dict, and a message is a dict; both contain only tensors and plain
    values, so that `torch.load(weights_only=True)` can read them.
    """

    address: str  # address of this rank's server, for `Member.states`

    def serve(
        self,
        snapshot: Callable[[], dict[str, Any]],
        messages: Callable[[int], list[dict[str, Any]]],
    ) -> None:
        """Start serving this rank's state to joiners.

        Args:
            snapshot: returns a copy of the state; called on a thread of the server, once for each
                joiner that begins a download.
            messages: takes the number of an exchange, and returns the messages of that and all
                later completed exchanges; raises a `LookupError` if some of these messages are no
                longer kept.
        """

    def fetch_snapshot(self, address: str) -> dict[str, Any]:
        """Fetch a snapshot of a rank's state, and resume the download if it is interrupted.

        Raises:
            ConnectionError: the server is gone or rejects the token.
        """

    def fetch_messages(self, address: str, first: int) -> list[dict[str, Any]]:
        """Fetch the messages of all completed exchanges, starting with exchange number `first`.

        The list is empty if that exchange is not complete yet.

        Raises:
            LookupError: some of these messages are no longer kept, so a new snapshot is needed.
            ConnectionError: the server is gone or rejects the token.
        """

    def close(self) -> None:
        """Stop serving this rank's state."""


# -- decisions


class Limits(NamedTuple):
    """Minimum and maximum number of replicas that take part in an exchange."""

    min_replicas: int = 1
    max_replicas: int = 8


class Decision(NamedTuple):
    """Decision about which replicas take part in the next exchange.

    All replicas in a quorum derive the same decision from it.
    """

    members: tuple[Member, ...] = ()  # members of the next view, by slot; empty if there is none
    established: tuple[Member, ...] = ()  # current members; empty before the job is created
    ahead: Member | None = None  # a member with a completed exchange that others must fetch first
    reason: str = ""  # why there is no next view
    restarted: bool = False  # there is no next view because the rendezvous has restarted
    missed: bool = False  # a quorum formed without these replicas, which may have been suspended
    is_same: bool = False  # the next view is the current one, whose channel still works
    left: int = 0  # size to which the last view has shrunk, if that is too small for the next one


def decide(quorum: Quorum, limits: Limits) -> Decision:
    """Decide from a quorum which replicas take part in the next exchange."""
    present = [m for m in quorum.members if m.status not in (NEW, JOINING, DEAD)]
    if not present:
        return _found(quorum, limits)
    top = max(m.flights for m in present)
    leaders = [m for m in present if m.flights == top]
    # a member that has left may be in an older view
    leader = min(leaders, key=lambda m: m.status in _GONE)
    views = {m.view for m in leaders}
    # all other members were unreachable while a later view was formed
    established = tuple(m for m in present if m.flights == top or m.view in views)
    no_view = Decision(established=established)
    staying = [m for m in established if m.status not in _GONE]
    if any(m.flights < top for m in staying):
        return no_view._replace(ahead=leader, reason="some members are behind")

    known = sum(m.view == leader.view for m in established)
    last = max(m.number for m in established)
    if 2 * known <= leader.view_size and quorum.number > last + 1:
        return no_view._replace(missed=True)
    if 2 * known <= leader.view_size and quorum.number <= last:
        reason = (
            "the rendezvous has restarted, and since then it has heard from only"
            f" {known} of {leader.view_size} replicas"
        )
        return no_view._replace(reason=reason, restarted=True)

    ready = [m for m in quorum.members if m.status == JOINING and m.flights == top]
    if any(m.status in (ENDING, FINISHED) for m in established):
        ready = []
    entering = _enter(ready, {m.slot for m in staying}, limits)
    members = tuple(sorted([*staying, *entering], key=lambda m: m.slot))
    if len(members) < limits.min_replicas:
        left = len(staying) if len(staying) < leader.view_size else 0
        return no_view._replace(reason=_too_few(len(members), limits), left=left)
    is_same = len(members) == leader.view_size and all(
        m.view == leader.view and not m.broken for m in members
    )
    return Decision(members, established, is_same=is_same)


def _enter(ready: Sequence[Member], taken: set[int], limits: Limits) -> list[Member]:
    """Assign slots to joining replicas, and return the records of those that received one.

    A rejoining replica gets its previous slot; if that slot is taken, it cannot join. New replicas
    get the lowest free slots.
    """
    back = [m for m in ready if m.slot in set(range(limits.max_replicas)) - taken]
    taken = taken | {m.slot for m in back}
    free = [slot for slot in range(limits.max_replicas) if slot not in taken]
    new = [m for m in ready if m.slot < 0]
    return back + [m._replace(slot=slot) for m, slot in zip(new, free, strict=False)]


def _found(quorum: Quorum, limits: Limits) -> Decision:
    """Decide which replicas create a new job: those that restored the latest step.

    A replica without a checkpoint counts as restored from step 0. Of the replicas that
    restored the latest step, those whose settings differ from the first one's are excluded.
    """
    new = [m for m in quorum.members if m.status == NEW]
    latest = [m for m in new if m.step == max(one.step for one in new)]
    founders = [m for m in latest if m.settings == latest[0].settings][: limits.max_replicas]
    if len(founders) < limits.min_replicas:
        return Decision(reason=_too_few(len(founders), limits))
    return Decision(tuple(m._replace(slot=slot) for slot, m in enumerate(founders)))


def shrunk(left: int) -> dict[str, Any]:
    """Return the fields to change in a member's record when its view shrinks to `left` members.

    The record must show this, because later quorums have the same number, which no longer proves
    that the missing members are dead. The view keeps its name, because a member that was only cut
    off may return after it has completed an exchange that this member has not.
    """
    return {"view_size": left, "broken": True}


def _too_few(count: int, limits: Limits) -> str:
    return f"only {count} of at least {limits.min_replicas} replicas (`min_replicas`) are present"


# -- this replica

_ASK_AGAIN_S = 0.2
_CONNECT_AGAIN_S = 0.05
_CONNECT = timedelta(seconds=15)  # time for the members of a new view to connect to each other
_LEAVE_S = 5.0  # how long a leaving replica waits for its last quorum
_NEVER = 2**62  # higher than the number of any quorum
_LAUNCHED = "launched/{}"  # key that announces an exchange's launch, in every replica's store
TOO_LATE = (
    "The other replicas are finishing their fit, so this one is too late to join. Their last"
    " checkpoint contains the result."
)
_NONE_LEFT = (
    "The replicas from which this one got its state are gone. Restart it to join again or, if no"
    " replica is left, to continue from the last checkpoint (`ckpt_path`)."
)


_CONTINUED = (
    "The other replicas continued without this one, because it did not respond for longer than the"
    " heartbeat timeout."
)
_LIMITS = Limits()


class LeftBehindError(RuntimeError):
    """Raised when the other members have continued without this one, which may rejoin."""


class ElasticMembership:
    """One replica's membership in an elastic job, in which replicas join, leave and die.

    Args:
        rendezvous: tracks which replicas are alive; used on the first rank only.
        transfer: serves this rank's state to joiners.
        replica: unique name of this replica, not reused after a restart.
        ledger: counts the bytes that exchanges send.
        host: address at which other replicas can reach this machine.
        limits: minimum and maximum number of replicas that take part in an exchange.
        timeout: timeout for an exchange, and for waiting until there are enough replicas.
        heartbeat_timeout_s: time without a heartbeat after which an exchange with a member is
            abandoned.
        ranks: connects the ranks of this replica; None means a single rank.
        by_time: whether members announce the launch of an exchange to each other (`announce`).

    Attributes:
        record: this replica's record, which it sends with every quorum request.
        view_members: the records of the members of the latest view, by slot.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        transfer: StateTransfer,
        replica: str,
        ledger: Ledger,
        host: str = "127.0.0.1",
        limits: Limits = _LIMITS,
        timeout: timedelta = timedelta(minutes=5),
        heartbeat_timeout_s: float = 5.0,
        ranks: ReplicaRanks | None = None,
        by_time: bool = False,
    ) -> None:
        self.rendezvous, self.transfer, self.ledger = rendezvous, transfer, ledger
        self.limits, self._timeout = limits, timeout
        self._host, self._heartbeat_timeout_s = host, heartbeat_timeout_s
        self._sockets = CloseOnFork()
        with self._sockets.opening():
            self._store = _store_on(host)
        address = f"{host}:{self._store.port}"
        self.ranks = ranks or ReplicaRanks()
        replica, address = self.ranks.share(lambda: [replica, address])
        states = tuple(self.ranks.gather(transfer.address))
        self.record = Member(replica, store=address, states=states)
        self._quorum = Quorum(0, ())
        self.view_members: tuple[Member, ...] = ()
        self._view = View(0, (0,), Channel([0], 0, ledger))
        self._agreed: View | None = None  # view for the next exchange, set by `start` or `enter`
        self.by_time = by_time
        self._own_slot = -1  # the slot that this replica had before it was left behind
        self._left_behind = False
        self._watched: dict[str, socket.socket | None] = {}  # connections to stores, by replica
        self._dead: set[str] = set()  # watched replicas whose process has ended
        self._announced = -1  # number of the latest announced exchange
        self._others: list[Any] = []  # clients of the other members' stores
        self._lock, self._closed = threading.Lock(), False

    def view(self) -> View:
        """Return the latest view: its members and the channel between them."""
        return self._view

    # -- starting and joining

    def start(self, settings: Mapping[str, str], step: int = 0, flights: int = 0) -> bool:
        """Create the job unless it exists; return whether this replica is one of its founders.

        A founder already has an open view for its first exchange. Any other replica must call
        `enter` to join the existing job.

        Args:
            settings: settings and model, which must be the same on all replicas.
            step: number of inner steps in the checkpoint from which this replica was restored.
            flights: number of exchanges that were launched before that step.

        Raises:
            RuntimeError: the job has ended or is about to end, or too few replicas were present for
                longer than the timeout.
            ValueError: other replicas have different settings.
        """
        self._agreed = None
        self._tell(status=NEW, step=step, flights=flights, settings=dict(settings))
        end_s = time.monotonic() + self._timeout.total_seconds()
        while True:
            quorum = self._ask()
            if not self.record.number:
                self._tell(number=quorum.number)
            decision = decide(quorum, self.limits)
            others = decision.established or decision.members
            if others:
                self._check_settings(quorum, others[0])
            if decision.established:
                self._refuse_late_joiner(decision)
                return False
            if decision.members:
                self._refuse_late(quorum.number, decision.members)
                if self.record.replica in [m.replica for m in decision.members]:
                    self._agreed = self._open(quorum, decision)
                    if self._agreed is not None:
                        return True
                    self._tell(status=NEW)
                    continue
            self._wait_until(end_s, decision.reason or "other replicas have begun without this one")

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context manager that requests quorums in the background during its block.

        A joiner uses it while it is not ready for an exchange. Without these requests, the members
        would wait for this replica.
        """
        self._tell(status=JOINING, flights=-1, slot=self._own_slot)
        done = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):  # a later request on the main thread raises the error
                while not done.is_set():
                    self._ask_alone()

        if not self.ranks.rank:
            threading.Thread(target=ask, name="joiner", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def enter(self, flights: int) -> int | None:
        """Request to take part in exchange number `flights`.

        Return None if this replica is in the view of that exchange. Otherwise, return the number of
        the exchange to request next: the members have completed all earlier exchanges, or are about
        to complete them without this replica.

        Raises:
            RuntimeError: the job has ended, all slots are taken, or no member is left.
        """
        while True:
            self._tell(status=JOINING, flights=flights, slot=self._own_slot)
            quorum = self._ask()
            decision = decide(quorum, self.limits)
            self._refuse_joiner(quorum, decision)
            if self.record.replica in [m.replica for m in decision.members]:
                self._agreed = self._open(quorum, decision)
                if self._agreed is not None:
                    self._left_behind = False
                    return None
            else:
                completed = max((m.flights for m in decision.established), default=-1)
                after = completed + bool(decision.members)
                if after > flights:
                    return after
            time.sleep(_ASK_AGAIN_S)

    @property
    def is_joined(self) -> bool:
        """Whether the latest quorum contained a replica that wants to join the job."""
        return any(m.status in (NEW, JOINING) for m in self._quorum.members)

    @property
    def waits(self) -> bool:
        """Whether the members are waiting for more replicas before they can exchange values."""
        decision = decide(self._quorum, self.limits)
        return not decision.members and decision.ahead is None

    @property
    def others_step(self) -> int:
        """The furthest position in the shared schedule that any member of the quorum has reported.

        In inner steps; 0 if the job does not exist yet.
        """
        return max((m.step for m in decide(self._quorum, self.limits).established), default=0)

    def donor(self, gone: set[str]) -> Member:
        """Choose the member from which this replica fetches the state.

        Args:
            gone: names of replicas that did not respond, which are not chosen; cleared if no other
                member is left, because these replicas may respond again.

        Raises:
            RuntimeError: no member is left.
        """
        member = Member(*self.ranks.share(lambda: self._find_donor(gone)))
        if member.replica in gone:
            gone.clear()
        return member

    def _find_donor(self, gone: set[str]) -> Member:
        while True:
            found = decide(self._quorum, self.limits).established
            if not found:
                raise RuntimeError(_NONE_LEFT)
            top = max(m.flights for m in found)
            for member in found:
                if member.flights == top and member.replica not in gone:
                    return member
            gone.clear()
            self._tell(status=JOINING, flights=-1, slot=self._own_slot)
            self._ask_alone()

    # -- before each exchange, on the background thread

    def agree(self, flight: int, step: int) -> View | Member:
        """Agree with the other members on the view for an exchange.

        Args:
            flight: number of the exchange. This replica must have completed all earlier ones.
            step: the inner step after which the exchange is launched.

        Returns:
            The view, or a member that has already completed the exchange, so that its messages can
            be fetched from that member.

        Raises:
            LeftBehindError: the other replicas have continued without this one.
            RuntimeError: the other replicas have continued without this one, and may have ended;
                this replica has left the job; or too few replicas were present for longer than the
                timeout.
        """
        if (agreed := self._agreed) is not None:
            self._agreed = None
            return agreed
        self._tell(flights=flight, step=step)
        end_s = time.monotonic() + self._timeout.total_seconds()
        while True:
            quorum = self._ask()
            decision = decide(quorum, self.limits)
            known = self.record.replica in [m.replica for m in decision.established]
            if decision.missed or not known:
                self._left_behind, self._own_slot = True, self.record.slot
                error = RuntimeError if decision.missed else LeftBehindError
                raise error(f"{_CONTINUED} Restart it, and it will join again.")
            if decision.ahead is not None:
                if decision.ahead.flights > flight:
                    return decision.ahead
                continue  # other members are fetching messages from this replica
            if self.record.status in _GONE:
                raise RuntimeError("This replica has left the job.")
            if decision.members:
                if (view := self._open(quorum, decision)) is not None:
                    return view
                continue
            self._wait_for_more(decision, end_s)

    def _wait_for_more(self, decision: Decision, end_s: float) -> None:
        if decision.left:
            self._tell(**shrunk(decision.left))
        if decision.restarted:
            self._tell(number=_NEVER)
        self._wait_until(end_s, decision.reason)

    def failed(self) -> None:
        """Mark the current view's channel as unusable, because an exchange has failed."""
        self._tell(broken=True)

    # -- announcing launches (`by_time`)

    def announce(self, flight: int) -> None:
        """Tell the other members that this replica has launched exchange number `flight`.

        This does not wait for the other members to respond.
        """
        self._announced = flight
        self._tell_others(flight)

    def is_launched(self, flight: int) -> bool:
        """Return whether another member has announced the launch of exchange number `flight`."""
        found: bool = self._store.check([_LAUNCHED.format(flight)])
        return found

    def _tell_others(self, flight: int) -> None:
        for store in self._others:
            with suppress(RuntimeError):  # that replica has died; the next exchange will detect it
                store.set(_LAUNCHED.format(flight), "")

    # -- ending

    def end(self) -> None:
        """Announce that the last exchanges of the fit have begun, so that no replica joins."""
        self._tell(status=ENDING)

    def leave(self) -> None:
        """Leave the job; the other replicas continue without this one.

        Wait up to `_LEAVE_S` seconds for a quorum that informs the other replicas. If there is
        none, they notice when this process ends.
        """
        self._tell(status=FINISHED if self.record.status == ENDING else LEAVING)
        known = self.record.view and not self._left_behind
        if known and not self._closed and not self.ranks.rank:
            asking = threading.Thread(target=self._say_leaving, name="leaving", daemon=True)
            asking.start()
            asking.join(_LEAVE_S)
        self.close()

    def close(self) -> None:
        """Stop sending heartbeats, and close all connections."""
        if not self._closed:
            self._closed = True
            for connection in filter(None, self._watched.values()):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.rendezvous.close()
            self.transfer.close()
            _reap(self._view.channel)

    # -- internals

    def _tell(self, **changes: Any) -> Member:
        with self._lock:
            self.record = self.record._replace(**changes)
            return self.record

    def _mine(self, quorum: Quorum) -> Member:
        """Return this replica's record in a quorum, as all other replicas see it."""
        return next(m for m in quorum.members if m.replica == self.record.replica)

    def _ask_alone(self) -> Quorum:
        self._quorum = self.rendezvous.quorum(self._tell(asked=self.record.asked + 1))
        self._ask_for_absent()
        return self._quorum

    def _ask_for_absent(self) -> None:
        """Request the next quorum on behalf of replicas that have died or left.

        The rendezvous counts every request as a heartbeat, so it would wait for these replicas
        until that heartbeat has expired. The first living member of the view does this, and at
        once: if a member was declared dead by mistake, its own next request replaces this one. If
        there are more such replicas than a view may have members, nobody does, and they expire.
        """
        members = decide(self._quorum, self.limits).members
        living = [m.replica for m in members if m.replica not in self._dead]
        absent = [m for m in self._quorum.members if m.status in ABSENT]
        if living[:1] == [self.record.replica] and len(absent) <= self.limits.max_replicas:
            for member in absent:
                threading.Thread(
                    target=self._ask_for, args=(member,), name="absent-member", daemon=True
                ).start()

    def _ask_for(self, member: Member) -> None:
        with suppress(RuntimeError):  # this replica is closing, or the rendezvous has restarted
            self.rendezvous.quorum(member)

    def _ask(self) -> Quorum:
        """Request a quorum on this replica's first rank, and return it on all ranks."""
        number, members = self.ranks.share(self._ask_alone)
        quorum = Quorum(number, tuple(Member(*fields) for fields in members))
        self._quorum = quorum
        if self.record.status in (MEMBER, ENDING) and self.record.number != _NEVER:
            self._tell(number=quorum.number)
        return quorum

    def _say_leaving(self) -> None:
        with suppress(RuntimeError):
            while decide(self._ask_alone(), self.limits).ahead is not None:
                pass  # other members are fetching messages from this replica

    def _wait_until(self, end_s: float, reason: str) -> None:
        if time.monotonic() > end_s:
            raise RuntimeError(
                f"Gave up after {self._timeout.total_seconds():g} s (`timeout`): {reason}."
            )
        time.sleep(_ASK_AGAIN_S)

    def _open(self, quorum: Quorum, decision: Decision) -> View | None:
        """Connect the members of the next view, or return the current view if it is the same.

        Return None if a member failed to connect, for example because it has died.
        """
        self.view_members = decision.members
        names = [m.replica for m in decision.members]
        slots, rank = tuple(m.slot for m in decision.members), names.index(self.record.replica)
        if decision.is_same:
            self._tell(number=quorum.number)
            return self._view

        name = _name_of(quorum)
        status = ENDING if self.record.status == ENDING else MEMBER
        self._tell(
            status=status,
            slot=slots[rank],
            view=name,
            view_size=len(slots),
            number=quorum.number,
            broken=True,
        )
        _reap(self._view.channel)
        channel = None
        try:
            channel = self._connect(name, decision.members[0].store, rank, len(slots))
        except RuntimeError as error:
            _log.warning("The members in slots %s could not connect: %s", list(slots), error)
        if not self.ranks.all(channel is not None) or channel is None:
            return None
        channel.peers = MemberWatch(self.rendezvous, names, self._heartbeat_timeout_s)
        if not self.ranks.rank:
            self._notice_ends(decision.members)
        if self.by_time:
            self._others = self._connect_others(decision.members)
            for flight in range(self.record.flights, self._announced + 1):
                self._tell_others(flight)  # a joiner does not know about in-flight exchanges
        self._view = View(quorum.number, slots, channel)
        self._tell(broken=False)
        return self._view

    def _connect(self, name: str, store: str, rank: int, size: int) -> Channel:
        """Connect to a view's other members through the first member's store; return a channel."""
        if size == 1:
            return Channel([0], 0, self.ledger)
        with self._sockets.opening():
            client = _client_of(store)
            # two groups, as in `Channel.open` with `full_duplex`
            up, down = (
                _gloo_group(
                    f"{name}/{self.ranks.rank}/{way}", client, rank, size, self._timeout, self._host
                )
                for way in ("up", "down")
            )
        return Channel(range(size), rank, self.ledger, up, downward=down)

    def _connect_others(self, members: Sequence[Member]) -> list[Any]:
        """Connect to the stores of the other members, except those that have just died."""
        found = []
        with self._sockets.opening():
            for member in members:
                with suppress(RuntimeError):  # the member has just died
                    if member.replica != self.record.replica:
                        found.append(_client_of(member.store))
        return found

    # -- the end of another member's process

    def _notice_ends(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.replica not in {self.record.replica, *self._watched}:
                self._watched[member.replica] = None
                threading.Thread(
                    target=self._notice_end, args=(member,), name="end-of-member", daemon=True
                ).start()

    def _notice_end(self, member: Member) -> None:
        """Wait until a member's process has ended, then request a quorum with the member as `DEAD`.

        This thread waits on an idle connection to the member's store. The connection carries no
        data, and breaks when the process ends. A network failure can also break it, and a process
        that is ending may close it before its listening socket. So this thread reconnects until the
        member's machine refuses the connection, which it does only if the process has ended.
        """
        is_first = True
        while True:
            try:
                with self._sockets.opening():
                    connection = _connect_to(member.store)
            except OSError as error:
                # a firewall may refuse all connections, so a refusal of the first proves nothing
                if isinstance(error, ConnectionRefusedError) and not is_first:
                    break
                return
            is_first = False
            with suppress(OSError), connection:
                self._watched[member.replica] = connection
                if not self._closed:
                    connection.recv(1)  # the store sends nothing
            if self._closed:
                return
            time.sleep(_CONNECT_AGAIN_S)
        self._dead.add(member.replica)
        names = [m.replica for m in self.view_members]
        living = [name for name in names if name not in self._dead]
        # only one member declares others dead, so that it knows how many have been declared
        declares = living[:1] == [self.record.replica]
        is_asked_for = member.replica in [m.replica for m in self._quorum.members]
        if declares and is_asked_for and 2 * (len(names) - len(living)) < len(names):
            self._ask_for(member._replace(status=DEAD))

    # -- refusals

    def _check_settings(self, quorum: Quorum, other: Member) -> None:
        mine, theirs = self._mine(quorum).settings, other.settings
        differ = [
            f"`{name}` is {mine.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        if differ:
            raise ValueError(
                f"This replica differs from the one in slot {max(other.slot, 0)}:"
                f" {'; '.join(differ)}. Start all replicas with the same settings and model."
            )

    def _refuse_late(self, number: int, founders: Sequence[Member]) -> None:
        """Raise an error if a new job would start at a rendezvous that has served an earlier job.

        A rendezvous does not report that a job has ended, but its quorum numbers continue. So if
        no founder has seen quorum number 1, the rendezvous has served an earlier job. A founder
        that was restored from a checkpoint may continue the earlier job.

        Raises:
            RuntimeError: the job at this rendezvous is over.
        """
        if self.record.step == 0 and number > 1 and all(m.number != 1 for m in founders):
            raise RuntimeError(
                "The job at this rendezvous is over: it has finished, or all its replicas are gone."
                " To continue it, start all replicas from its last checkpoint (`ckpt_path`). To"
                " begin a new job, restart the rendezvous."
            )

    def _refuse_late_joiner(self, decision: Decision) -> None:
        if any(m.status in (ENDING, FINISHED) for m in decision.established):
            raise RuntimeError(TOO_LATE)

    def _refuse_joiner(self, quorum: Quorum, decision: Decision) -> None:
        self._refuse_late_joiner(decision)
        mine = self._mine(quorum)
        top = max((m.flights for m in decision.established), default=-1)
        if top < mine.flights:
            raise RuntimeError(_NONE_LEFT)
        if mine.slot >= 0 and any(
            m.slot == mine.slot and m.replica != mine.replica for m in decision.established
        ):
            raise RuntimeError(
                f"{_CONTINUED} Another replica has taken its slot. Restart this one to join again."
            )
        full = len(decision.members) == self.limits.max_replicas
        if (
            full
            and mine.flights == top
            and mine.replica not in [m.replica for m in decision.members]
        ):
            raise RuntimeError(
                f"All {self.limits.max_replicas} slots are taken (`max_replicas`). To use more"
                " replicas, restart all of them from a checkpoint with a higher `max_replicas`."
            )


def _name_of(quorum: Quorum) -> str:
    """Return a name for the view that a quorum starts: a hash of the quorum."""
    return hashlib.sha256(repr(quorum).encode()).hexdigest()[:16]


def _store_on(host: str) -> Any:
    """Create a `TCPStore` that listens only on `host`.

    By default, it would listen on all network interfaces.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _client_of(store: str) -> Any:
    """Connect to the store at "host:port"."""
    host, _, port = store.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=False, wait_for_workers=False, timeout=_CONNECT
    )


def _connect_to(store: str) -> socket.socket:
    host, _, port = store.rpartition(":")
    connection = socket.create_connection((host, int(port)), _CONNECT.total_seconds())
    connection.settimeout(None)
    return connection


def _gloo_group(
    name: str, store: Any, rank: int, size: int, timeout: timedelta, host: str
) -> dist.ProcessGroup:
    """Create a gloo group that is not registered with `torch.distributed`.

    Such a group needs no default process group. All ranks of the group must call this function and
    connect within `_CONNECT`. The group listens on `host`. By default, gloo would listen on the
    address to which the host name resolves; on Debian, other machines cannot reach that address.
    """
    keys = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = _CONNECT
    backend = gloo(keys, rank, size, options)
    backend._set_default_timeout(timeout)
    group: Any = dist.ProcessGroup(keys, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    made: dist.ProcessGroup = group
    return made


def _reap(channel: Channel) -> None:
    """Destroy a channel's process groups on a separate thread.

    Destroying a gloo group blocks until its pending exchanges have ended.
    """
    groups = [channel.group, channel._downward]
    channel.group = channel._downward = None
    threading.Thread(target=groups.clear, name="reaper", daemon=True).start()
