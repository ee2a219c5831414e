"""Membership of an elastic job, in which replicas join, leave and die.

A *flight* is one exchange of the job. Flights are numbered from 0 in the order in which they are
launched, which is the same on all members. Before each flight, the members ask the *rendezvous* for
a *quorum*: as soon as every live member has asked, it answers all of them together with everyone's
`Member` record. All decisions are functions of that answer, so that all members make the same
decisions without further messages:

- *Founding.* If nobody is a member yet, all replicas that asked become founders, at flight 0.
- *The next view.* The view of a flight consists of the members that have completed all earlier
  flights and of joiners that have caught up. Members do not wait for a joiner that is behind.
- *After a failure.* A member that dies breaks the exchange, possibly on some members only. If some
  have completed the flight, the others fetch its messages from one of them; otherwise all repeat it
  in the view without the dead member.
- *No split views.* A restarted rendezvous has forgotten the members and may answer any subset of
  them. So a view must contain more than half of the members of the last one. Fewer are enough if
  the quorum's number is the next in sequence: the rendezvous then knows that all others are dead.
- *A member's process ends.* The kernel of its machine then refuses connections to its store. The
  first member that finds out asks in its place, as `DEAD`, so that nobody waits until its heartbeat
  is old. A member that is taken for dead by mistake finds this record in the answer. Because the
  dead do not count, this is done only if they are a minority of the view.
- *Coming back.* A member that was stopped or cut off finds that the others have continued without
  it. It may join again, in its old slot.
- *Too few.* With fewer than `min_replicas`, the members wait. If some are known to be dead then,
  the others count as the last view from then on.

Members ask on a background thread, and only a landing waits for the answer. Two parts can be
replaced: the rendezvous (`Rendezvous`) and the transfer of state to joiners (`StateTransfer`).
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
from lightning_commfree.comm.member_watch import MemberWatch
from lightning_commfree.comm.replica_ranks import ReplicaRanks
from lightning_commfree.comm.sockets import CloseOnFork

_log = logging.getLogger(__name__)

NEW = "new"  # wants to found the job, or to join it
JOINING = "joining"  # is fetching state, and is not part of a view yet
MEMBER = "member"
ENDING = "ending"  # a member that has begun the last exchanges of its fit: nobody may join
LEAVING = "leaving"  # takes part in no more flights
FINISHED = "finished"  # the same as `LEAVING`, at the end of its fit
DEAD = "dead"  # its process has ended, says the member that asks in its place
_GONE = (LEAVING, FINISHED)


class Member(NamedTuple):
    """A replica's record, which it sends to the others whenever it asks for a quorum.

    All fields are JSON values.
    """

    replica: str  # unique name of this process, not reused after a restart
    status: str = NEW
    flights: int = 0  # number of flights that it has completed; -1 while a joiner is not ready
    slot: int = -1  # index of its share of the data and place in views; -1 before it is a member
    view: str = ""  # name of the last view that it was in; "" if none
    view_size: int = 0  # number of members of that view
    number: int = 0  # number of the last quorum that it was in; if `NEW`, of the first one
    broken: bool = False  # an exchange in that view has failed, so its channel is unusable
    asked: int = 0  # number of times that this process has asked; makes each quorum unique
    settings: Mapping[str, str] = {}  # settings and model, the same on all replicas
    step: int = 0  # number of inner steps in the common schedule
    store: str = ""  # "host:port" of its TCPStore, where the channels of a view meet
    states: tuple[str, ...] = ()  # addresses of its ranks' state servers, in rank order


class Quorum(NamedTuple):
    """An answer of the rendezvous, the same for all replicas in it."""

    number: int  # from 1; increases when the replicas change; a restarted rendezvous starts over
    members: tuple[Member, ...]  # the replicas that asked, in order of `replica`


class Rendezvous(Protocol):
    """Service that knows which replicas are alive."""

    def quorum(self, mine: Member) -> Quorum:
        """Ask for a quorum as `mine.replica`; block until the quorum is complete.

        The answer comes once all replicas of the previous quorum that still send heartbeats have
        asked. A replica sends heartbeats from its first call until `close`, even while it waits
        here. If a thread asks while another one waits, the later record replaces the earlier one,
        and both get the same answer. While the service is unreachable, the call keeps trying.

        Raises:
            RuntimeError: there is no such service at the address, or it was unreachable or did not
                answer for longer than the job's timeout. The message says which.
        """

    def heartbeats(self) -> Mapping[str, float]:
        """Return the seconds since the last heartbeat of each replica that has sent any.

        Raises:
            ConnectionError: the service does not answer.
        """

    def close(self) -> None:
        """Stop the heartbeat, and interrupt a `quorum` in another thread with a `RuntimeError`."""


class StateTransfer(Protocol):
    """Serves one rank's state to joiners, and fetches other ranks' state.

    A snapshot is a (nested) dict, and a message is a dict; both contain only tensors and plain
    values, so that `torch.load(weights_only=True)` can read them.
    """

    address: str  # address of this rank's server, for `Member.states`

    def serve(
        self,
        snapshot: Callable[[], dict[str, Any]],
        messages: Callable[[int], list[dict[str, Any]]],
    ) -> None:
        """Start serving.

        Args:
            snapshot: returns a copy of the state; called on a thread of the server, once for each
                joiner that begins a download.
            messages: returns the messages of all completed flights from a given one on; raises a
                `LookupError` if some of them are no longer kept.
        """

    def fetch_snapshot(self, address: str) -> dict[str, Any]:
        """Fetch a snapshot, resuming the download if it is interrupted.

        Raises:
            ConnectionError: the server is gone or rejects the token.
        """

    def fetch_messages(self, address: str, first: int) -> list[dict[str, Any]]:
        """Fetch the messages of all completed flights from `first` on, if there are any.

        Raises:
            LookupError: some of these messages are no longer kept, so a new snapshot is needed.
            ConnectionError: the server is gone or rejects the token.
        """

    def close(self) -> None:
        """Stop serving."""


# -- decisions


class Limits(NamedTuple):
    """Allowed sizes of a view."""

    min_replicas: int = 1
    max_replicas: int = 8


class Decision(NamedTuple):
    """The decision that a quorum implies for all replicas in it."""

    members: tuple[Member, ...] = ()  # of the next view, by slot; empty if there is none yet
    established: tuple[Member, ...] = ()  # the members so far; empty before the founding
    ahead: Member | None = None  # a member with a completed flight that others must fetch first
    reason: str = ""  # why there is no next view
    restarted: bool = False  # the reason is that the rendezvous has restarted
    missed: bool = False  # there was a quorum without these replicas, which may have been stopped
    is_same: bool = False  # the next view is the current one, whose channel still works
    left: int = 0  # size to which the last view has shrunk, if that is too small for the next one


def decide(quorum: Quorum, limits: Limits) -> Decision:
    """Return the decision that a quorum implies."""
    present = [m for m in quorum.members if m.status not in (NEW, JOINING, DEAD)]
    if not present:
        return _found(quorum, limits)
    top = max(m.flights for m in present)
    leaders = [m for m in present if m.flights == top]
    leader, views = leaders[0], {m.view for m in leaders}
    # the others were out of touch while a later view was formed
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
    """Give slots to joiners: those that come back have one already, and stay out if it is taken."""
    back = [m for m in ready if m.slot in set(range(limits.max_replicas)) - taken]
    taken = taken | {m.slot for m in back}
    free = [slot for slot in range(limits.max_replicas) if slot not in taken]
    new = [m for m in ready if m.slot < 0]
    return back + [m._replace(slot=slot) for m, slot in zip(new, free, strict=False)]


def _found(quorum: Quorum, limits: Limits) -> Decision:
    """Found a job with the replicas that restored the latest step (0 if none has a checkpoint)."""
    new = [m for m in quorum.members if m.status == NEW]
    latest = [m for m in new if m.step == max(one.step for one in new)]
    founders = [m for m in latest if m.settings == latest[0].settings][: limits.max_replicas]
    if len(founders) < limits.min_replicas:
        return Decision(reason=_too_few(len(founders), limits))
    return Decision(tuple(m._replace(slot=slot) for slot, m in enumerate(founders)))


def shrunk(left: int) -> dict[str, Any]:
    """Return the changes to the record of a member whose view has shrunk to `left` members.

    Later quorums have the same number, so they do not show that the other members are dead. The
    view keeps its name, because a member that was only cut off may come back with a flight that
    this one has not completed.
    """
    return {"view_size": left, "broken": True}


def _too_few(count: int, limits: Limits) -> str:
    return f"only {count} of at least {limits.min_replicas} replicas (`min_replicas`) are present"


# -- this replica

_ASK_AGAIN_S = 0.2
_CONNECT = timedelta(seconds=15)  # time for the members of a new view to connect to each other
_LEAVE_S = 5.0  # how long a replica waits for the others to ask before it leaves
_NEVER = 2**62  # higher than the number of any quorum
_LAUNCHED = "launched/{}"  # key for a flight, in the store of every replica
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
    """The other members have continued without this one, which may join again."""


class ElasticMembership:
    """One replica's membership in an elastic job.

    Args:
        rendezvous: knows which replicas are alive; used on the first rank only.
        transfer: serves this rank's state.
        replica: unique name of this replica, not reused after a restart.
        ledger: counts the bytes of the exchanges.
        host: address at which other replicas can reach this machine.
        limits: allowed sizes of a view.
        timeout: timeout for an exchange, and for waiting until there are enough replicas.
        heartbeat_timeout_s: time without a heartbeat after which an exchange with a member is
            abandoned.
        ranks: the ranks of this replica; None means a single rank.
        by_time: whether members tell each other when they launch a flight (`announce`).

    Attributes:
        record: this replica's record, which it sends to the others.
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
        self._agreed: View | None = None  # for the next flight, set by `start` or `enter`
        self.by_time = by_time
        self._own_slot = -1  # of a replica that comes back
        self._left_behind = False
        self._watched: dict[str, socket.socket | None] = {}  # connections, by replica
        self._dead: set[str] = set()  # of these, those whose process has ended
        self._announced = -1  # the latest flight
        self._others: list[Any] = []  # clients of the other members' stores
        self._lock, self._closed = threading.Lock(), False

    def view(self) -> View:
        """Return the latest view."""
        return self._view

    # -- beginning

    def start(self, settings: Mapping[str, str], step: int = 0, flights: int = 0) -> bool:
        """Find the job, or found it; return whether this replica is a founder.

        A founder has an open view for its first flight. Any other replica must call `enter`.

        Args:
            settings: settings and model, which must be the same on all replicas.
            step: number of inner steps in the checkpoint from which this replica was restored.
            flights: number of flights before that step.

        Raises:
            RuntimeError: the job has ended.
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
        """Keep asking during a `with` block, so that members do not wait for this replica.

        This is for a joiner that is not ready.
        """
        self._tell(status=JOINING, flights=-1, slot=self._own_slot)
        done = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):  # the main thread asks later and raises the error
                while not done.is_set():
                    self._ask_alone()

        if not self.ranks.rank:
            threading.Thread(target=ask, name="joiner", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def enter(self, flights: int) -> int | None:
        """Ask to take part in flight number `flights`.

        Return None if this replica is in the flight's view. Otherwise, return the number of the
        next flight to ask for: the members have completed all earlier ones, or are about to
        complete them without this replica.

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
        """Whether another replica is about to join."""
        return any(m.status in (NEW, JOINING) for m in self._quorum.members)

    @property
    def waits(self) -> bool:
        """Whether the members complete no flight until more replicas are there."""
        decision = decide(self._quorum, self.limits)
        return not decision.members and decision.ahead is None

    @property
    def others_step(self) -> int:
        """Step in the common schedule that the members have reached, as far as is known."""
        return max((m.step for m in decide(self._quorum, self.limits).established), default=0)

    def donor(self, gone: set[str]) -> Member:
        """Return a member from which to fetch the state.

        Args:
            gone: names of replicas that did not answer; cleared when newer records arrive.

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

    # -- before each flight, on the background thread

    def agree(self, flight: int, step: int) -> View | Member:
        """Return the view for a flight, or a member that has already completed the flight.

        Args:
            flight: number of the flight. This replica must have completed all earlier flights.
            step: the inner step after which the flight is launched.

        Raises:
            LeftBehindError: the other replicas continue without this one.
            RuntimeError: the same, and they may have ended; or too few replicas were present for
                longer than the timeout.
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
                continue  # others are fetching this replica's messages
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
        """Report that an exchange in the current view has failed."""
        self._tell(broken=True)

    # -- launches, by time

    def announce(self, flight: int) -> None:
        """Tell the other members that this replica has launched a flight; waits for nobody."""
        self._announced = flight
        self._tell_others(flight)

    def is_launched(self, flight: int) -> bool:
        """Return whether another member has announced a flight."""
        found: bool = self._store.check([_LAUNCHED.format(flight)])
        return found

    def _tell_others(self, flight: int) -> None:
        for store in self._others:
            with suppress(RuntimeError):  # that replica has died; its next exchange will show it
                store.set(_LAUNCHED.format(flight), "")

    # -- the end

    def end(self) -> None:
        """Announce the last exchanges of the fit, so that nobody joins."""
        self._tell(status=ENDING)

    def leave(self) -> None:
        """Leave the job; the other replicas continue without this one.

        Wait up to `_LEAVE_S` seconds for the others to learn of it. If they do not, they notice
        when the process ends.
        """
        self._tell(status=FINISHED if self.record.status == ENDING else LEAVING)
        known = self.record.view and not self._left_behind
        if known and not self._closed and not self.ranks.rank:
            asking = threading.Thread(target=self._say_leaving, name="leaving", daemon=True)
            asking.start()
            asking.join(_LEAVE_S)
        self.close()

    def close(self) -> None:
        """Stop the heartbeat and close all connections."""
        if not self._closed:
            self._closed = True
            for connection in filter(None, self._watched.values()):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.rendezvous.close()
            self.transfer.close()
            _reap(self._view.channel)

    # -- inside

    def _tell(self, **changes: Any) -> Member:
        with self._lock:
            self.record = self.record._replace(**changes)
            return self.record

    def _mine(self, quorum: Quorum) -> Member:
        """Return this replica's record as all others see it."""
        return next(m for m in quorum.members if m.replica == self.record.replica)

    def _ask_alone(self) -> Quorum:
        self._quorum = self.rendezvous.quorum(self._tell(asked=self.record.asked + 1))
        return self._quorum

    def _ask(self) -> Quorum:
        """Ask on the first rank; return the answer on all ranks."""
        number, members = self.ranks.share(self._ask_alone)
        quorum = Quorum(number, tuple(Member(*fields) for fields in members))
        self._quorum = quorum
        if self.record.status in (MEMBER, ENDING) and self.record.number != _NEVER:
            self._tell(number=quorum.number)
        return quorum

    def _say_leaving(self) -> None:
        with suppress(RuntimeError):
            while decide(self._ask_alone(), self.limits).ahead is not None:
                pass  # others are fetching this replica's messages

    def _wait_until(self, end_s: float, reason: str) -> None:
        if time.monotonic() > end_s:
            raise RuntimeError(
                f"Gave up after {self._timeout.total_seconds():g} s (`timeout`): {reason}."
            )
        time.sleep(_ASK_AGAIN_S)

    def _open(self, quorum: Quorum, decision: Decision) -> View | None:
        """Connect the members of the next view, or return the current one if it is the same.

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
                self._tell_others(flight)  # a joiner has not heard of those in flight
        self._view = View(quorum.number, slots, channel)
        self._tell(broken=False)
        return self._view

    def _connect(self, name: str, store: str, rank: int, size: int) -> Channel:
        """Open a view's channel; its members connect through a store that the first one hosts."""
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
        """Return clients of the other members' stores."""
        found = []
        with self._sockets.opening():
            for member in members:
                with suppress(RuntimeError):  # it has just died
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
        """Wait until the process of a member has ended, and ask for quorums in its place.

        An idle connection costs nothing, and breaks when the process ends. A network can break it
        too, so ask the kernel of its machine.
        """
        try:
            with self._sockets.opening():
                connection = _connect_to(member.store)
        except OSError:
            return  # a firewall may refuse it, so a later refusal would mean nothing
        with suppress(OSError), connection:
            self._watched[member.replica] = connection
            connection.recv(1)  # the store sends nothing
        if self._closed or not _is_refused(member.store):
            return
        self._dead.add(member.replica)
        dead = sum(m.replica in self._dead for m in self.view_members)
        is_asked_for = member.replica in [m.replica for m in self._quorum.members]
        if is_asked_for and 2 * dead < len(self.view_members):
            with suppress(RuntimeError):
                self.rendezvous.quorum(member._replace(status=DEAD))

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
        """Refuse to found a new job at the rendezvous of a job that is over.

        A rendezvous does not report that a job has ended, but its quorum numbers continue. So one
        of the founders of a new job must have seen number 1.
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
    """Return the name of the view that begins with a quorum."""
    return hashlib.sha256(repr(quorum).encode()).hexdigest()[:16]


def _store_on(host: str) -> Any:
    """Create a store that listens on `host` only; by default, it would use every interface."""
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


def _is_refused(store: str) -> bool:
    """Return whether nobody listens at "host:port" any more, although its machine answers."""
    try:
        _connect_to(store).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _gloo_group(
    name: str, store: Any, rank: int, size: int, timeout: timedelta, host: str
) -> dist.ProcessGroup:
    """Create a gloo group that `torch.distributed` does not register, so it needs no default group.

    This is collective over the group's ranks and must complete within `_CONNECT`. The group listens
    on `host`: by default, gloo listens on the address to which the host name resolves, which other
    machines cannot reach on Debian.
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
    """Destroy a channel's groups on a thread, because gloo waits for pending exchanges first."""
    groups = [channel.group, channel._downward]
    channel.group = channel._downward = None
    threading.Thread(target=groups.clear, name="reaper", daemon=True).start()
