"""An elastic job as a log in a store, as one rank of a replica sees it.

    config        settings of the job, its first flight, and the replica that created it
    roster/N      the N-th replica that came, from 0: its name and slot, or a question (`enroll`);
                  of one that continues after SIGTERM, also its former name (`take_over`)
    here/N/NAME   the answer of replica NAME to the question roster/N
    x/F/NAME      message of replica NAME in flight F; `ABSTAINS` or `LEAVES` if it takes no part
    commit/F      replicas whose messages are averaged in flight F, in order (`decision`)
    y/F/NAME      mean of the parts that NAME owns of these messages, if they are many (`parts`)
    go/F          flight F has been launched by some replica; only with `by_time`
    state/F       outer state after flight F; the data of all states are in part/ (`states`)
    state/NAME    outer state with which the job begins, of the replica that created `config`
    head          number of a recent state; overwritten, and may be stale if a replica was stopped
                  while it wrote it
    low           number of the first flight whose messages have not been deleted; overwritten, and
                  may be stale, as `head`
    end           number of flights of the job, once a replica has landed all of them
    state/end     outer state after the last flight, with the final weights; created before `end`

Commits are never deleted: a replica that slept for an hour must not be able to create one again. A
message is deleted only after `head` has moved beyond its flight, so a listed message that does not
exist means either that it was deleted, if `head` or `end` says so, or that the store is slow.

In a replica of several ranks, each of them has its own part of messages and states: rank R > 0 adds
".R" to the keys of its messages. Rank 0 creates its part when all others exist, so who finds it
finds all. Rank 0 decides for the whole replica (`elastic.ranks`), while the others only read their
parts of what it has decided.

Three threads talk to the store: one creates messages, one states, which are much larger and must
not delay a message, and one looks for what others created. Training waits only in `JobLog.landed`.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from itertools import product
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from lightning_commfree.elastic.decision import (
    Commit,
    Group,
    Heard,
    Land,
    Look,
    Read,
    Reduce,
    Rules,
    decide,
)
from lightning_commfree.elastic.parts import (
    SIZE_BYTES,
    StoreExchange,
    opened,
    opened_from,
    size_of,
)
from lightning_commfree.elastic.polling import PAUSE_S, first_look_s, look_at_s, watch_pause_s
from lightning_commfree.elastic.processes import has_ended, this_process
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.elastic.states import States
from lightning_commfree.stores.retrying import Retrying, VerbCount
from lightning_commfree.stores.store import Store, StoreError

P = ParamSpec("P")
T = TypeVar("T")
Jobs = queue.SimpleQueue[Callable[[], object] | None]
_log = logging.getLogger(__name__)

ABSTAINS = b"-"  # message of a replica that has no finite values
LEAVES = b"."  # message of a replica that leaves the job
# A replica that sent nothing in so many flights is looked for only in each flight whose number is
# a multiple.
_SILENT_FLIGHTS = 10
_GRACES = 10  # for which the last round waits, and a flight in which no message counts
_RECENT = 4  # flights from whose times the next one's is guessed
_ANSWER_S = 6.0  # how long the owner of a slot may take to answer a newcomer, ...
_DEAD_S = 1.5  # ... if it is not in the latest commit any more, but in one of the ...
_REMEMBERED = 40  # ... latest so many
_END = "end"  # in place of a state's flight: after the last one
_ASKS = -1  # in place of a slot: this entry of the roster is a question
TERMINATED = 128 + 15  # exit code of a process that SIGTERM has ended
_SAY_S = 20.0  # how often to say why training waits


class Entry(NamedTuple):
    """A replica in a commit."""

    name: str
    size: int  # bytes of the message of its rank 0


class Member(NamedTuple):
    """An entry of the roster: a replica, or (slot `_ASKS`) a question who is still there."""

    name: str  # unique for each start of a process
    slot: int  # index of its share of the training data; `_ASKS`: the entry is a question
    former: str = ""  # if it continues after SIGTERM (`take_over`): its name until then
    since: int = 0  # the first flight in which it has the new name
    process: str = ""  # of its rank 0, from `this_process`


class Landed(NamedTuple):
    """What was read to land a flight, in the commit's order."""

    members: list[Member]
    objects: list[list[memoryview]]  # parts of the messages, or means of the owners' parts
    abstained: bool  # this replica
    link_s: float | None  # the requests of this replica for its message and the others'


class LeftError(SystemExit):
    """The time to leave after SIGTERM has passed; ends the process with exit code 143."""


class PostponedError(Exception):
    """This replica leaves, and lands the flight when it is back."""


class MissedError(Exception):
    """Messages of a flight were deleted: continue from a newer state."""


@dataclass
class _Flight:
    """What this rank knows about a flight that it has not landed."""

    launched: bool = False  # by this replica, or followed without a message
    launched_s: float = -math.inf
    messages: dict[str, bytes] = field(default_factory=dict)  # by replica; or just the sizes
    commit: list[Entry] | None = None
    reduction: StoreExchange | None = None  # if members of the commit own parts
    read: dict[str, list[memoryview]] = field(default_factory=dict)  # as `decision.Heard.read`
    due_s: float | None = None  # when training began to wait
    commit_s: float = -math.inf  # when this rank took the commit
    away_s: float = 0.0  # for how long the store had been away by the later of the two
    looked_s: float = -math.inf  # when the latest look for others' messages began
    asked_s: float = -math.inf  # when the latest request about it ended
    missed: bool = False
    up_s: float | None = None  # duration of the request that stored this replica's message, ...
    down_s: float = 0.0  # ... and of those that found something

    def __post_init__(self) -> None:
        self.landed = threading.Event()


def _leaving(
    method: Callable[Concatenate[JobLog, P], T],
) -> Callable[Concatenate[JobLog, P], T]:
    """Decorate a method of the training thread: it raises `LeftError` if `leave` cut it short."""

    @wraps(method)
    def call(self: JobLog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except StoreError:
            if time.monotonic() > self._leave_by_s - 0.1:
                raise LeftError(TERMINATED) from None
            raise

    return call


class JobLog:
    """One rank's access to the log. Its methods are for the training thread.

    `begin`, `end`, `newest_state` and `landed` are collective within the replica.
    `min_replicas` is the minimum number of messages for a commit. `for_states` is the same store
    by another connection, so that messages neither wait for states nor seem late when those fail.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        sizes: Callable[[int], Collection[int]],  # bytes that a message in a flight may have
        min_replicas: int = 1,
        grace_s: float | None = None,  # None: 0.5 s and twice the mean time of a request
        by_time: bool = False,
        ranks: ReplicaRanks | None = None,  # None: the replica has a single rank
        # exchange of a flight with so many members, if these own parts
        reduction: Callable[[int, int], StoreExchange | None] = lambda flight, members: None,
        for_states: Store | None = None,
    ) -> None:
        self._stop = threading.Event()  # ends pauses between tries of a request
        self.store, self.name = Retrying(store, stop=self._stop), name
        self._sizes, self.min_replicas = sizes, min_replicas
        self._grace_s, self._by_time = grace_s, by_time
        self.ranks = ranks or ReplicaRanks()
        self._suffix = f".{self.ranks.rank}" if self.ranks.rank else ""
        self.states = States(Retrying(for_states or store, stop=self._stop), name, self.ranks)
        self._reduction = reduction
        self.launched = 0  # number of the next flight to launch
        self.last_round = math.inf  # number of the first flight of the last round, once it is known
        self.roster: list[Member] = []
        self._renamed: dict[str, Member] = {}  # entries with a former name, by that name ...
        self._had_left: dict[str, Member] = {}  # ... and by the new one
        self._flights: dict[int, _Flight] = {}  # neither landed nor forgotten
        self._ask_head_at = 0  # number of a flight
        self._following = False  # whether this replica has been late, by the training thread
        self._asked = -1  # the flight about which the training thread has asked
        self._others_launched = -1  # latest flight that another replica is known to have launched
        self._latest: frozenset[str] = frozenset()  # replicas in the latest commit
        self._left: dict[str, int] = {}  # replicas that said so, and their first flight without
        self._first, self._founder = 0, name  # the job's first flight, and who created it
        self._latest_flight = -1
        self._heard: dict[str, int] = {}  # by replica, its latest flight, or when it came
        self._watched_s = self._asked_go_s = -math.inf
        self._launched_s = time.monotonic()
        self._interval_s = 0.0  # between the latest two launches
        self._took_s: deque[float] = deque(maxlen=_RECENT)  # from launch to commit
        self._new: set[str] = set()  # replicas that came, and have not been heard from
        self._jobs: Jobs = queue.SimpleQueue()
        self._state_jobs: Jobs = queue.SimpleQueue()
        self._storing = False  # a state
        # The training thread and all threads below read and change `launched`, `_flights`, the
        # messages of a flight, `_latest`, `_heard`, `_new` and `_others_launched`: hold the lock.
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._roster_lock = threading.Lock()  # held during a request
        self._closed, self._leave_by_s = False, float("inf")
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(
                target=self._run, args=(work,), name=f"log {work.__name__}", daemon=True
            )
            for work in (self._upload, self._store_states, self._look)
        ]

    # -- joining

    @_leaving
    def begin(self, config: Mapping[str, str], state: Callable[[], bytes], first: int = 0) -> None:
        """Create the job, or check that it has the same settings.

        `state` returns this replica's own state, with which the job begins if this replica creates
        it; `first` is the number of the first flight.

        Raises:
            ValueError: the job has other settings.
        """
        is_new = self.ranks.first(lambda: self.store.get("config") is None)
        if is_new:
            # before the settings: who finds settings finds the states of all ranks
            self.states.create(self.name, state(), self.ranks.gather)
            if self.ranks.rank == 0:
                mine = {"first": first, "founder": self.name, "settings": dict(config)}
                self.store.create("config", json.dumps(mine, sort_keys=True).encode())
            self.ranks.gather(0)
        while (data := self.store.get("config")) is None:
            self._pause()
        self.states.is_complete(self.name)  # connects: from now on, a replaced server is noticed
        theirs = json.loads(data)
        self._first, self._founder = int(theirs["first"]), str(theirs["founder"])
        if is_new and self._founder != self.name and self.ranks.rank == 0:
            self.states.delete(self.name, [self.name])
        known = dict[str, str](theirs["settings"])
        differ = [
            f"`{key}` is {config.get(key, 'absent')} here and {known.get(key, 'absent')} there"
            for key in sorted({*known, *config})
            if known.get(key) != config.get(key)
        ]
        if differ:
            raise ValueError(
                f"The job in {self.store.address} was started with other settings:"
                f" {'; '.join(differ)}. Use the same settings, or another store for another job."
            )

    @_leaving
    def enroll(self, max_replicas: int) -> Member | None:
        """Enter the roster with a free slot, and return the entry; None if no slot is free now.

        If all slots have an owner, take that of a process that has ended on this machine. If there
        is none, ask who is still there: a question in the roster. An owner that does not answer
        loses its slot. If it comes back, two replicas train on one share. Only rank 0 may call
        this.
        """
        asked: int | None = None  # number of the question
        while True:
            self._read_roster()
            if mine := [one for one in self.roster if one.name == self.name and one.slot != _ASKS]:
                return mine[0]
            owners = {one.slot: n for n, one in enumerate(self.roster) if one.slot != _ASKS}
            free = [slot for slot in range(max_replicas) if slot not in owners]
            free = free or [s for s, n in owners.items() if has_ended(self.roster[n].process)]
            if not free and asked is not None:
                free = self._silent(owners, asked)
                if not free:
                    return None
            number = len(self.roster)
            slot = min(free) if free else _ASKS
            me = Member(self.name, slot, process=this_process())
            if not self.store.create(f"roster/{number}", json.dumps(me).encode()):
                self._pause()  # another one was faster
            elif not free:
                asked = number

    @_leaving
    def take_over(self, former: str, flight: int) -> bool:
        """Enter the roster as the replica `former`, which left before it launched `flight`.

        Return False if `former` does not own a slot: it was in another job, or another replica has
        the slot now, perhaps one that has continued from the same state. Collective.
        """
        took = bool(self.ranks.first(lambda: self._take_over(former, flight)))
        while took and self.name not in self._had_left:  # ranks above 0 only read it
            self._pause()
            self._read_roster()
        return took

    def _take_over(self, former: str, flight: int) -> bool:
        """Return whether the roster has the entry; rank 0 alone writes it."""
        while True:
            self._read_roster()
            slots = {one.slot: one.name for one in self.roster if one.slot != _ASKS}
            if self.name in slots.values():
                return True
            slot = next((slot for slot, owner in slots.items() if owner == former), _ASKS)
            if slot == _ASKS:
                return False
            me = Member(self.name, slot, former, flight, this_process())
            if not self.store.create(f"roster/{len(self.roster)}", json.dumps(me).encode()):
                self._pause()  # another one was faster

    def name_in(self, flight: int, name: str = "") -> str:
        """Return the name of a replica in a flight; `name` is any that it has had.

        By default, the replica is this one.
        """
        name = name or self.name
        while (one := self._had_left.get(name)) and flight < one.since:
            name = one.former
        while (one := self._renamed.get(name)) and flight >= one.since:
            name = one.name
        return name

    def _silent(self, owners: Mapping[int, int], asked: int) -> list[int]:
        """Return the slots whose owners do not answer an earlier question.

        `owners` are entries in the roster, by slot. In an outage, a look takes as long as it lasts,
        and the owners still have the time of the other looks.
        """
        silent = {n: self.roster[n].name for n in owners.values() if n < asked}
        gone = self._dropped_out()
        for look in range(1, math.ceil(_ANSWER_S / PAUSE_S[1]) + 1):
            self._stop.wait(PAUSE_S[1])
            for entry, name in list(silent.items()):
                if self.store.get(f"here/{asked}/{name}") is not None:
                    del silent[entry]
            # who has dropped out is probably dead: its slot need not wait for the others' answers
            dead = [n for n, name in silent.items() if name in gone]
            if not silent or (dead and look * PAUSE_S[1] >= _DEAD_S):
                silent = {n: silent[n] for n in dead}
                break
        return [slot for slot, entry in owners.items() if entry in silent]

    def _dropped_out(self) -> frozenset[str]:
        """Return the names of replicas that are in recent commits, but not in the latest one."""
        flight = max(int(self.store.get("head") or self._first) - _REMEMBERED, self._first)
        every: frozenset[str] = frozenset()
        latest = every
        while (data := self.store.get(f"commit/{flight}")) is not None:
            latest = frozenset(Entry(*entry).name for entry in json.loads(data))
            every, flight = every | latest, flight + 1
        return every - latest

    def _pause(self) -> None:
        """Wait for what another replica has created and this one does not see yet."""
        if self._stop.wait(PAUSE_S[0]):
            raise LeftError(TERMINATED)

    @_leaving
    def end(self) -> int:
        """Return the number of flights of a job that has ended, otherwise -1."""
        return self.ranks.first(lambda: int(self.store.get("end") or -1))

    @_leaving
    def newest_state(self) -> tuple[int, bytes]:
        """Return the number of the newest state, and this rank's part of it."""
        tried = math.inf
        while True:
            flight = self.ranks.first(self._newest)
            if flight > tried:
                _log.warning(
                    "The outer state after exchange %d was deleted while this replica read it. It"
                    " reads the next one. If this goes on, its link to %s is too slow for the job:"
                    " raise `sync_every`.",
                    tried,
                    self.store.address,
                )
            tried = flight
            if self.end() == flight + 1:
                which = _END
            else:
                which = str(flight) if flight >= self._first else self._founder
            data = self.states.read(which)
            if all(self.ranks.gather(data is not None)) and data is not None:
                return flight, data
            self._pause()

    def _newest(self) -> int:
        """Return the number of the newest state; the first flight's minus 1 if there is none."""
        if (end := self.store.get("end")) is not None:
            return int(end) - 1
        head = int(self.store.get("head") or self._first - 1)
        # `head` may be stale and its state deleted, if a replica was stopped before it wrote it
        names = (key.removeprefix("state/") for key in self.store.list("state/"))
        return max([head, *(int(name) for name in names if name.isdigit())])

    def write_state(self, flight: int, state: Callable[[], bytes], every: int) -> None:
        """Create the state after a flight, and delete what is old; collective.

        `state` runs on the thread that creates states. `every` is the least number of flights
        between two of them.
        """

        def write() -> None:
            self.states.create(str(flight), state(), self.ranks.gather_for_state)
            if self.ranks.rank == 0:
                self._point_to(flight)
            self._storing = False
            self._delete_old(flight, every)

        self._storing = True
        self._state_jobs.put(write)

    def write_final_state(self, flight: int, state: Callable[[], bytes]) -> None:
        """Create the state after the last flight, which ends the job; wait until it is stored.

        Collective; `state` runs on the thread that creates states.
        """
        stored = threading.Event()

        def write() -> None:
            self.states.create(_END, state(), self.ranks.gather_for_state)
            if self.ranks.rank == 0:
                self.states.store.create("end", str(flight + 1).encode())
            stored.set()

        self._state_jobs.put(write)
        while not stored.wait(0.1):
            self._check_threads()

    def is_storing(self) -> bool:
        """Return whether rank 0 has not stored an earlier state yet; collective.

        To delete what is old, after that, does not count.
        """
        return bool(self.ranks.first(lambda: self._storing))

    def start(self, launched: int) -> None:
        """Start the threads; the next flight to launch has the number `launched`."""
        self.launched = launched
        for name in {one.slot: one.name for one in self.roster}.values():
            self._heard[name] = launched  # any of them may be there
        self._new.clear()
        for thread in self._threads:
            thread.start()

    # -- flights

    def launch(self) -> int:
        """Take part in the next flight, and return its number; `send` adds a message to it."""
        with self._lock:
            flight, self.launched = self.launched, self.launched + 1
            known, now_s = self._flights.setdefault(flight, _Flight()), time.monotonic()
            known.launched, known.launched_s = True, now_s
            self._interval_s, self._launched_s = now_s - self._launched_s, now_s
        if self._by_time and flight > self._others_launched:
            self.later(lambda: self.store.create(f"go/{flight}", b""))
        self._wake.set()
        return flight

    def send(self, flight: int, make: Callable[[], bytes]) -> None:
        """Create this rank's message in a flight; `make` runs on the thread that creates it."""

        def send() -> None:
            message, began_s = make(), time.monotonic()
            self._create(f"x/{flight}/{self.name}", message)
            with self._lock:
                if known := self._flights.get(flight):
                    known.up_s = time.monotonic() - began_s
            self._hear(flight, {self.name: message})

        self.later(send)

    def say_leaving(self) -> None:
        """Tell the others not to wait for this replica, from its next flight on."""
        key = f"x/{self.launched}/{self.name}{self._suffix}"
        self.later(lambda: self.store.create(key, LEAVES))

    def is_stored(self) -> bool:
        """Wait until the store has all messages that this replica has created; collective.

        Return False if the time to leave passes before that.
        """
        stored = threading.Event()
        self.later(stored.set)
        left_s = max(self._leave_by_s - time.monotonic(), 0.0)
        return all(self.ranks.gather(stored.wait(left_s)))

    def landed(self, flight: int) -> Landed:
        """Wait until a flight can land; return its members, and what was read of them.

        Raises:
            MissedError: the messages have been deleted.
            LeftError: `leave` was called, and its time has passed.
            PostponedError: it was called, and the flight can wait until this replica is back.
        """
        with self._lock:
            known = self._flights[flight]
            known.due_s, known.away_s = time.monotonic(), self.store.away_s
        self._wake.set()
        say_s = known.due_s + _SAY_S
        while not known.landed.wait(0.1):
            self._check_threads()
            # several ranks would have to agree on it, and after the last round there is no job
            leaves = self._leave_by_s < math.inf
            if leaves and self.ranks.size == 1 and self.last_round == math.inf:
                raise PostponedError
            if time.monotonic() > say_s:
                say_s += _SAY_S
                _log.warning("%s", self._why_waiting(flight, known))
        with self._lock:
            del self._flights[flight]
        missed = known.missed or known.commit is None
        if any(self.ranks.gather(missed)):
            raise MissedError
        assert known.commit is not None
        by_name = {member.name: member for member in self.roster}
        return Landed(
            [by_name[entry.name] for entry in known.commit],
            [known.read[entry.name] for entry in known.commit if entry.name in known.read],
            known.messages.get(self.name_in(flight)) == ABSTAINS,
            None if known.up_s is None else known.up_s + known.down_s,
        )

    def _check_threads(self) -> None:
        """Raise the error of a thread, or `LeftError` if the time to leave has passed."""
        if self._error is not None:
            text = f"A thread that uses {self.store.address} has ended."
            raise RuntimeError(text) from self._error
        if time.monotonic() > self._leave_by_s:
            raise LeftError(TERMINATED)

    def _why_waiting(self, flight: int, known: _Flight) -> str:
        """Return a sentence for the user about what training waits for."""
        waited_s = time.monotonic() - (known.due_s or 0.0)
        text = f"Training has waited for exchange {flight} for {waited_s:.0f} s: "
        if self.store.failed_s > time.monotonic() - _SAY_S:
            return f"{text}the store {self.store.address} does not answer. It is asked again."
        with self._lock:
            sent = sum(message != LEAVES for message in known.messages.values())
        if known.commit is None and sent < self.min_replicas:
            return (
                f"{text}{sent} of at least {self.min_replicas} replicas"
                f" (`min_replicas={self.min_replicas}`) have sent a message. Start the others."
            )
        return f"{text}the store {self.store.address} is slow."

    def is_decided(self, flight: int) -> bool:
        """Return whether a flight is known to have a commit."""
        with self._lock:
            return flight in self._flights and self._flights[flight].commit is not None

    @_leaving
    def is_behind(self, following: bool) -> bool:
        """Return whether the others have gone on: they have decided the next flight.

        With `by_time`, it is enough that one of them has launched it. This is so, too, if this
        replica is `following`: its latest flight had no message, or one that came too late. If it
        skipped only what is decided, it would begin each flight when the others land it, and if
        they do not wait for it, be late for ever.
        """
        flight, self._following = self.launched, following
        if following and flight != self._asked and not self.is_decided(flight):
            self._asked = flight  # then `_read_go` looks
            one = self._next_flight()[1]
            self._read_commit(flight, one)
        has_begun = self._others_launched >= flight
        return self.is_decided(flight) or ((self._by_time or following) and has_begun)

    @_leaving
    def is_far_behind(self, flights: int) -> bool:
        """Return whether a state is more than so many flights ahead.

        Ask the store again only after half as many.
        """
        if self.launched < self._ask_head_at:
            return False
        self._ask_head_at = self.launched + flights // 2
        head = self.store.get("head")
        return head is not None and int(head) > self.launched + flights

    @_leaving
    def is_listed(self, flight: int) -> bool:
        """Return whether a flight that others have landed counted this replica's message."""
        while (data := self.store.get(f"commit/{flight}")) is None:
            self._pause()
        return self.name_in(flight) in [Entry(*entry).name for entry in json.loads(data)]

    def _point_to(self, flight: int) -> None:
        """Overwrite `head` unless it is newer: a replica that was stopped must not set it back."""
        head = self.states.store.get("head")
        if head is None or int(head) < flight:
            self.states.store.overwrite("head", str(flight).encode())

    def later(self, job: Callable[[], object]) -> None:
        """Run `job`, a request, on the thread that creates messages, until it succeeds."""
        self._jobs.put(job)

    def _delete_old(self, newest: int, every: int) -> None:
        """Delete what is not needed to begin with the state `newest` or the one before it.

        Collective. Whoever began with an older one may have to begin again.
        """
        gather, is_first = self.ranks.gather_for_state, self.ranks.rank == 0
        low, before = self._span_of_old(newest, every) if is_first else (0, 0)
        low, before = gather(low)[0], gather(before)[0]
        names = self._names_since(low - every)
        for flight in range(low, before + 1):
            self._delete_messages(flight, names)
        gather(0)  # all ranks have deleted theirs
        if not is_first:
            return
        if newest < low - 1:  # it was late: two newer ones exist
            self.states.delete(str(newest), names)
        elif before >= low:
            if low == self._first:
                self.states.delete(self._founder, [self._founder])
            for flight in range(before - every, max(low - 2, self._first - 1), -every):
                self.states.delete(str(flight), names)
            self.states.store.overwrite("low", str(before + 1).encode())

    def _span_of_old(self, newest: int, every: int) -> tuple[int, int]:
        """Return the first flight whose messages are there, and the last whose are not needed.

        The last one is less than the first if all are needed.
        """
        low = int(self.states.store.get("low") or self._first)
        # The state before may still be on its way, or was left out. If it comes later, whoever
        # stores the next state deletes it.
        earlier = range(newest - every, low - 1, -every)
        complete = (flight for flight in earlier if self.states.is_complete(str(flight)))
        return low, next(complete, low - 1)

    def _names_since(self, flight: int) -> set[str]:
        """Return the replicas that may have sent a message in a flight or later."""
        owners = {one.slot: one.name for one in self.roster}
        with self._lock:
            return {*owners.values(), *(n for n, last in self._heard.items() if last >= flight)}

    def _delete_messages(self, flight: int, names: Iterable[str]) -> None:
        """Delete this rank's part of the messages of replicas of these names in a flight."""
        # no flight had more members than the roster has entries
        folders = "xy" if self._reduction(flight, len(self.roster)) else "x"
        for name, folder in product(names, folders):
            self.states.store.delete(f"{folder}/{flight}/{name}{self._suffix}")
        if self.ranks.rank == 0:
            self.states.store.delete(f"go/{flight}")

    def continue_at(self, flight: int) -> None:
        """Forget all flights that have not landed; `flight` is the next one to launch."""
        with self._lock:
            self._flights.clear()
            self.launched, self._launched_s = flight, time.monotonic()

    def leave(self, within_s: float) -> None:
        """Stop waiting for anything after `within_s` seconds; a signal handler may call this."""
        self._leave_by_s = min(self._leave_by_s, time.monotonic() + within_s)
        timer = threading.Timer(within_s, self._stop.set)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Complete what is to be created, unless `leave` has a limit, and stop the threads."""
        self._jobs.put(None)
        self._state_jobs.put(None)
        *create, look = self._threads
        for thread in create:
            self._join(thread)
        self._closed = True
        self._stop.set()
        self._wake.set()
        self._join(look)
        self.ranks.close()

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a thread that was started; once `leave` was called, no longer than it allows."""
        if thread.ident is not None:  # it has been started
            left_s = min(self._leave_by_s - time.monotonic(), threading.TIMEOUT_MAX)
            thread.join(max(left_s, 0.0))

    # -- the threads

    def _run(self, work: Callable[[], None]) -> None:
        """Run `work` on a thread; keep its error for `landed` to raise."""
        try:
            work()
        except StoreError:
            pass  # after `leave` or `close`: until then, requests are repeated
        except Exception as error:  # noqa: BLE001 - `landed` raises it on the training thread
            self._error = error

    def _upload(self) -> None:
        """Run the requests of `later` in order; the work of the first thread."""
        while (job := self._jobs.get()) is not None:
            job()
            self._wake.set()

    def _store_states(self) -> None:
        """Store states in order; the work of the second thread."""
        while (job := self._state_jobs.get()) is not None:
            job()

    def _look(self) -> None:
        """Look for what others have created, until `close`; the work of the third thread."""
        while not self._closed:
            if self._watch_at_s() <= time.monotonic():
                self._watch()
            if self._go_at_s() <= time.monotonic():
                self._read_go()
            with self._lock:
                flights = sorted(self._flights.items())
            for flight, one in flights:
                self._advance(flight, one)
            looks_s = [self._look_at_s(one) for _, one in flights if not one.landed.is_set()]
            next_s = min(self._watch_at_s(), self._go_at_s(), *looks_s)
            self._wake.wait(max(next_s - time.monotonic(), 0.0))
            self._wake.clear()

    @property
    def _is_founding(self) -> bool:
        """Whether no commit is known yet; replicas that come now begin with the first flight."""
        return self._latest_flight < self._first

    def _watch_at_s(self) -> float:
        """Return when to look for newcomers again."""
        return self._watched_s + watch_pause_s(self._interval_s)

    def _watch(self) -> None:
        """Look for newcomers, and for a commit of the flight that this replica launches next."""
        self._read_roster()
        flight, known = self._next_flight()
        if known.commit is None:
            self._read_commit(flight, known)
        self._watched_s = time.monotonic()

    def _go_at_s(self) -> float:
        """Return when to look again for another replica's launch of the next flight; may be inf."""
        if not self._by_time and not self._following:
            return math.inf
        return look_at_s(self._launched_s, 0.0, self._asked_go_s)

    def _read_go(self) -> None:
        """Look whether another replica has launched the flight that this one launches next."""
        flight = self.launched
        if self._others_launched < flight and self._has_begun(flight):
            with self._lock:
                self._others_launched = max(self._others_launched, flight)
        self._asked_go_s = time.monotonic()

    def _has_begun(self, flight: int) -> bool:
        """Return whether another replica has launched the flight, as far as the store shows."""
        if self._by_time:
            return self.store.get(f"go/{flight}") is not None
        with self._lock:
            latest = self._latest
        others = {self.name_in(flight, name) for name in latest} - {self.name_in(flight)}
        begins = (self.store.get_range(f"x/{flight}/{name}", 0, 2) for name in others)
        return any(begin not in (None, LEAVES) for begin in begins)

    def _next_flight(self) -> tuple[int, _Flight]:
        """Return the number and the record of the flight that this replica launches next."""
        with self._lock:  # a flight that has landed must not come back
            return self.launched, self._flights.setdefault(self.launched, _Flight())

    def _look_at_s(self, known: _Flight) -> float:
        """Return when to look for a flight's commit and messages again."""
        if known.due_s is not None:
            return look_at_s(known.due_s, 0.0, known.asked_s)
        if known.launched:
            return look_at_s(known.launched_s, first_look_s(self._took_s), known.asked_s)
        # `_watch` looks for its commit
        return math.inf if known.commit is None else known.asked_s + watch_pause_s(0.0)

    def _advance(self, flight: int, known: _Flight) -> None:
        """Do what comes next for a flight, until nothing is new or it is too early to look."""
        while not known.landed.is_set() and not self._closed:
            before, began_s = self._found(known), time.monotonic()
            heard = self._what_is_heard(flight, known)
            action = decide(heard, self._group(flight), self._rules(flight))
            if isinstance(action, Land):
                known.landed.set()
                return
            if isinstance(action, Look) and began_s < self._look_at_s(known):
                return
            if isinstance(action, Commit) and self._is_founding and self._read_roster():
                continue  # those that came meanwhile are founders, too
            self._request(flight, known, action)
            known.asked_s = time.monotonic()
            if before != self._found(known):
                known.down_s += known.asked_s - began_s
            elif not isinstance(action, Look):  # after such a look, the grace may have passed
                return

    @staticmethod
    def _found(known: _Flight) -> tuple[int, object, int]:
        """Return a summary of what is known about a flight, to see whether a request adds to it."""
        return len(known.messages), known.commit, len(known.read)

    def _request(self, flight: int, known: _Flight, action: Look | Read | Reduce | Commit) -> None:
        """Carry out an action of `decide` for a flight, and wait for the store's answers."""
        match action:
            case (Read() | Reduce()) as follows:
                self._follow_commit(flight, known, follows)
            case Commit(names):
                self._commit(flight, known, names)
            case Look(names):
                began_s = time.monotonic()
                self._read_commit(flight, known)
                if known.commit is None:
                    self._look_for(flight, names)
                known.looked_s = began_s

    def _what_is_heard(self, flight: int, known: _Flight) -> Heard:
        """Return a flight's record in the form that `decide` takes."""
        commit = None if known.commit is None else tuple(entry.name for entry in known.commit)
        owners = (commit or ())[: known.reduction.owners if known.reduction else 0]
        late_s = None
        if known.due_s is not None:
            # Until the latest look, not until now: a process that was stopped, or whose requests
            # take longer than the grace, must look once more before it leaves others out. And a
            # store that did not answer tells nothing about the other replicas.
            late_s = known.looked_s - max(known.due_s, known.commit_s)
            late_s -= self.store.away_s - known.away_s
        with self._lock:
            messages = dict(known.messages)
        counts = {n: data != ABSTAINS for n, data in messages.items() if data != LEAVES}
        may_commit, read = known.launched and self.ranks.rank == 0, frozenset(known.read)
        return Heard(may_commit, counts, commit, late_s, self.name_in(flight), owners, read)

    def _rules(self, flight: int) -> Rules:
        """Return grace, patience and the least number of replicas for a flight."""
        gets = self.store.counts().get("get", VerbCount())
        auto_s = 0.5 + 2 * gets.seconds / max(gets.requests, 1)
        grace_s = auto_s if self._grace_s is None else self._grace_s
        patience_s = _GRACES * grace_s
        # what is not sent in the last round is lost: no flight follows
        return Rules(
            patience_s if flight >= self.last_round else grace_s, patience_s, self.min_replicas
        )

    def _group(self, flight: int) -> Group:
        """Return whom to wait for in a flight, and who may take part in it."""
        with self._lock:
            heard, latest, new = dict(self._heard), self._latest, set(self._new)
            left = {name for name, first in self._left.items() if first <= flight}
        names = {one.name for one in self.roster if one.slot != _ASKS}
        names = {self.name_in(flight, name) for name in names} - left
        possible = {n for n in names if heard.get(n, flight) >= flight - _SILENT_FLIGHTS}
        if flight % _SILENT_FLIGHTS == 0:  # it may be back; not if another one has its slot
            possible |= names & {*{one.slot: one.name for one in self.roster}.values()}
        recent = {n for n, last in heard.items() if last >= flight - 1} - new
        if flight == self.last_round:
            recent = possible
        expected = {self.name_in(flight, name) for name in latest | recent} & possible
        me = {self.name_in(flight)}
        return Group(frozenset(expected | me), frozenset(possible | me))

    def _hear(self, flight: int, messages: Mapping[str, bytes]) -> None:
        """Keep others' messages in a flight, and note that they are there."""
        with self._lock:
            if flight in self._flights:
                self._flights[flight].messages.update(messages)
            for name, message in messages.items():
                self._heard[name] = max(self._heard.get(name, -1), flight)
                self._new.discard(name)
                if message == LEAVES:
                    self._left[name] = flight

    # -- requests

    def _read_roster(self) -> bool:
        """Read the roster's new entries; return whether there are any."""
        with self._roster_lock:  # or two threads would both append an entry
            known = len(self.roster)
            while (data := self.store.get(f"roster/{len(self.roster)}")) is not None:
                member = Member(*json.loads(data))
                if member.slot != _ASKS:
                    self._note_entry(member)
                elif self._threads[0].is_alive():
                    self._answer(len(self.roster))
                self.roster.append(member)
            return len(self.roster) > known

    def _note_entry(self, member: Member) -> None:
        """Note that a replica has come."""
        name = member.name
        if member.former:
            self._renamed[member.former] = self._had_left[name] = member
        with self._lock:
            if not self._is_founding:
                self._new.add(name)
            self._heard[name] = max(self._heard.get(name, 0), self.launched)

    def _answer(self, question: int) -> None:
        """Tell a newcomer that this replica still needs its slot (`enroll`)."""
        self.later(lambda: self.store.create(f"here/{question}/{self.name}", b""))

    def _create(self, key: str, data: bytes) -> None:
        """Create this rank's part of a message, rank 0 last; on the thread that creates them."""
        if self._suffix:
            self.store.create(f"{key}{self._suffix}", data)
        self.ranks.meet()
        if not self._suffix:
            self.store.create(key, data)

    def _look_for(self, flight: int, names: Iterable[str]) -> None:
        """Read messages in a flight without a commit, as far as they are there; keep valid ones.

        If their parts will probably be reduced, read only their sizes.
        """
        sizes = self._sizes(flight)
        reduces = self._reduction(flight, len(self._group(flight).expected)) is not None
        for name in names:
            if name == self.name:
                continue
            key = f"x/{flight}/{name}{self._suffix}"
            data = self.store.get_range(key, 0, SIZE_BYTES) if reduces else self.store.get(key)
            if data is None:
                continue
            is_complete = reduces or len(data) == size_of(data)
            if data not in (ABSTAINS, LEAVES) and not (is_complete and size_of(data) in sizes):
                _log.warning(
                    "The message of %s in exchange %d has another size than all messages of this"
                    " job. It is left out.",
                    name,
                    flight,
                )
                data = ABSTAINS  # a message that cannot be decoded would stop all
            self._hear(flight, {name: data})

    def _follow_commit(self, flight: int, known: _Flight, action: Read | Reduce) -> None:
        """Read or create what a commit still needs, as far as the store has it."""
        match action:
            case Reduce(owners):
                self._reduce(flight, known, owners)
            case Read(names) if known.reduction:
                known.looked_s = time.monotonic()
                self._read_means(flight, known, names)
            case Read(names):
                self._read_messages(flight, known, names)

    def _read_messages(self, flight: int, known: _Flight, names: Iterable[str]) -> None:
        """Read messages in a commit, as far as the store shows them."""
        for name in names:
            data = self._range(flight, known, name)
            if data is None:
                return
            known.read[name] = data

    def _range(
        self, flight: int, known: _Flight, name: str, span: tuple[int, int] | None = None
    ) -> list[memoryview] | None:
        """Return the parts of a listed message, or those in a span of bytes; None if absent."""
        key = f"x/{flight}/{name}{self._suffix}"
        with self._lock:
            data: bytes | None = known.messages.get(name, b"")
        if not data or len(data) != size_of(data):
            data = self.store.get_range(key, *span) if span else self.store.get(key)
        elif span:
            data = data[span[0] :][: span[1]]
        if data is None and self._has_gone_on(flight):  # deleted
            known.missed = True
            known.landed.set()
        return None if data is None else opened_from(self.store.address, key, data)

    def _read_means(self, flight: int, known: _Flight, owners: Iterable[str]) -> None:
        """Read the means of the owners' parts, as far as the store shows them."""
        for name in owners:
            key = f"y/{flight}/{name}{self._suffix}"
            if (data := self.store.get(key)) is not None:
                known.read[name] = opened_from(self.store.address, key, data)

    def _reduce(self, flight: int, known: _Flight, owners: Iterable[str]) -> None:
        """Create the means of the owners' parts, or take those that others have created."""
        exchange, names = known.reduction, [entry.name for entry in known.commit or ()]
        assert exchange is not None
        for name in owners:
            owner = names.index(name)
            messages = []
            for one in names:
                parts = self._range(flight, known, one, exchange.span(owner))
                if parts is None:
                    return
                messages.append(parts)
            data = exchange.reduce(owner, messages)
            if self.store.create(f"y/{flight}/{name}{self._suffix}", data):
                known.read[name] = opened(data)
            else:
                self._read_means(flight, known, [name])

    def _has_gone_on(self, flight: int) -> bool:
        """Return whether the job has a state after a flight."""
        head = self.store.get("head")
        # nobody corrects a stale `head` after the end
        return int(head or -1) > flight or self.store.get("end") is not None

    def _commit(self, flight: int, known: _Flight, names: Iterable[str]) -> None:
        """Create a flight's commit with the messages of `names`; or take the store's."""
        with self._lock:
            found = dict(known.messages)
        entries = [Entry(name, size_of(found[name])) for name in names]
        if self.store.create(f"commit/{flight}", json.dumps(entries).encode()):
            self._take_commit(flight, known, entries)
        else:
            self._read_commit(flight, known)

    def _read_commit(self, flight: int, known: _Flight) -> None:
        """Take a flight's commit from the store, if it is there."""
        data = self.store.get(f"commit/{flight}")
        if data is None:
            return
        entries = [Entry(*entry) for entry in json.loads(data)]
        names = {entry.name for entry in entries}
        if not names <= {member.name for member in self.roster}:
            self._read_roster()
        if names <= {member.name for member in self.roster}:  # or the store is slow: look again
            self._take_commit(flight, known, entries)

    def _take_commit(self, flight: int, known: _Flight, entries: list[Entry]) -> None:
        """Keep a commit, and learn from it who is there and how long it took."""
        with self._lock:
            if known.commit is None and known.launched:
                self._took_s.append(time.monotonic() - known.launched_s)
            known.reduction = self._reduction(flight, len(entries))
            known.commit = entries
            # owners can begin only now
            known.commit_s, known.away_s = time.monotonic(), self.store.away_s
            names = frozenset(entry.name for entry in entries)
            if flight > self._latest_flight:  # an older commit may be read later
                self._latest, self._latest_flight = names, flight
            self._new -= names
            for name in names:
                self._heard[name] = max(self._heard.get(name, -1), flight)
            self._others_launched = max(self._others_launched, flight)
