"""Faults of stores and replicas, after which every replica still equals its serial twin.

Faults come at chosen requests and last for a number of requests, so the load of the machine changes
how long a test takes, not what happens. Requests take milliseconds here, and steps too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lightning_commfree.elastic import log as log_module
from lightning_commfree.elastic import polling
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.log import JobLog, LeftError, Member, MissedError, _Flight
from lightning_commfree.elastic.parts import sealed
from lightning_commfree.stores import retrying
from tests.elastic.log_twin import (
    Job,
    Replica,
    assert_equal_the_twin,
    killing,
    listed_in,
    play,
    wait_until,
)
from tests.elastic.memory_store import MemoryStore
from tests.elastic.scripted_store import Eventual, Rule, ScriptedStore, refused
from tests.elastic.turns import Turns
from tests.stores.faulty_store import FaultyStore

pytestmark = pytest.mark.usefixtures("turns")

MESSAGE = sealed([b"0123456789"])
# Flights 3, 4, 5 are launched after steps 16, 18, 21 and so on, and two are in flight.
MANY: dict[str, Any] = {"sync_every": 8, "num_fragments": 3, "overlap_steps": 5}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(retrying, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(polling, "_WATCH_S", (0.05, 0.05))
    for module in (polling, log_module):
        monkeypatch.setattr(module, "PAUSE_S", (0.01, 0.05))


# -- a store that fails


def faulty(job: Job, seed: int) -> FaultyStore:
    """5 % of the requests fail, half of them after they were carried out; each takes 4 ms."""
    return FaultyStore(job.store, refused=0.025, lost=0.025, delay_s=0.004, seed=seed)


def test_a_slow_store_that_fails_costs_no_step() -> None:
    job = Job(MemoryStore(), 50, {**MANY, "wire_dtype": "fp4"}, grace_s=60.0, min_replicas=3)
    replicas = [Replica(f"r{i}", i, job, store=faulty(job, i)).start() for i in range(3)]
    play(replicas)
    assert [one.steps for one in assert_equal_the_twin(replicas)] == [50, 50, 50]
    assert {*map(len, listed_in(job.store))} == {3}
    assert sum(count.failures for one in replicas for count in counts(one)) > 10


def hearing(job: Job, name: str, at: int) -> Callable[[ElasticDiLoCo, int], None]:
    """Return what makes a replica wait, after a step, for another one's next message."""

    def act(diloco: ElasticDiLoCo, step: int) -> None:
        if step == at:
            key = f"x/{diloco.transport.log.launched}/{name}"
            wait_until(lambda: key in job.store.objects)

    return act


def counts(replica: Replica) -> list[Any]:
    assert replica.log is not None
    return [*replica.log.store.counts().values()]


def test_a_death_and_a_joiner_in_a_slow_store_that_fails() -> None:
    changes = {**MANY, "wire_dtype": "bf16"}
    job = Job(MemoryStore(), 80, changes, grace_s=0.5, min_replicas=2, step_s=0.005)

    wait = hearing(job, "again", 50)
    replicas = [Replica(f"r{i}", i, job, wait, store=faulty(job, i)).start() for i in range(2)]
    replicas.append(Replica("r2", 2, job, killing(30), store=faulty(job, 2)).start())
    replicas[2].thread.join()
    replicas.append(Replica("again", 2, job, store=faulty(job, 3)).start())
    play(replicas)
    assert_equal_the_twin(replicas)
    assert {name for names in listed_in(job.store) for name in names} >= {"r0", "r1", "again"}


class Outage:
    """The store is away for an hour, from the first request of a kind on.

    Each replica fails at least three times before `hour` is set, and then three times.
    """

    def __init__(self, verb: str, prefix: str, carried_out: bool, turns: Turns) -> None:
        self.verb, self.prefix, self.carried_out, self.turns = verb, prefix, carried_out, turns
        self.names: list[str] = []
        self.left: dict[str, int] = {}  # how often each replica still fails
        self.phase = 0  # before, in the first and the second part of the outage, after
        self.hour, self.lock = threading.Event(), threading.Lock()

    def rule(self, name: str) -> Rule:
        self.names.append(name)

        def rule(verb: str, key: str, request: Callable[[], Any]) -> Any:
            with self.lock:
                begins = self.phase == 0 and verb == self.verb and key.startswith(self.prefix)
                if begins:
                    self.next_phase()
                if self.phase not in (1, 2):
                    return request()
                if begins and self.carried_out:
                    request()
                self.left[name] -= 1
                if max(self.left.values()) <= 0 and self.hour.is_set():
                    self.turns.now_s += 3600 * (self.phase == 1)
                    self.next_phase()
            raise refused(verb)

        return rule

    def next_phase(self) -> None:
        self.phase += 1
        self.left = dict.fromkeys(self.names, 3)


def now_needs(least: int, replicas: Sequence[Replica]) -> None:
    """Change `min_replicas`, which made all of them begin together."""
    for one in replicas:
        assert one.log is not None
        one.log.min_replicas = least


@pytest.mark.parametrize(
    ("verb", "prefix", "carried_out", "wire_dtype"),
    [
        ("create", "x/4/", False, "fp32"),
        ("create", "x/4/", True, "bf16"),
        ("create", "commit/4", False, "int8"),
        ("create", "commit/4", True, "fp4"),
        ("get", "x/4/", False, "int2"),
    ],
)
def test_nobody_is_left_out_because_of_an_outage(
    verb: str, prefix: str, carried_out: bool, wire_dtype: str, turns: Turns
) -> None:
    """At each of the three requests of a flight, for much longer than the grace."""
    changes = {**MANY, "wire_dtype": wire_dtype}
    job = Job(MemoryStore(), 40, changes, grace_s=60.0, min_replicas=3)
    outage = Outage(verb, prefix, carried_out, turns)
    replicas = [Replica(f"r{i}", i, job) for i in range(3)]
    for one in replicas:
        one.store = ScriptedStore(job.store, outage.rule(one.name))
    for one in replicas:
        one.start()
    wait_until(lambda: outage.phase > 0)
    now_needs(1, replicas)
    outage.hour.set()
    play(replicas, 2 * 3600)
    assert outage.phase == 3
    assert [one.steps for one in assert_equal_the_twin(replicas)] == [40, 40, 40]
    assert {*map(len, listed_in(job.store))} == {3}


@pytest.fixture
def log() -> Iterator[JobLog]:
    one = JobLog(MemoryStore(), "r0", lambda flight: (len(MESSAGE),), grace_s=0.5)
    one.begin({}, lambda: b"state")
    one.enroll(2)
    yield one
    one.leave(0.0)
    one.close()


def test_the_time_in_which_the_store_was_away_is_not_part_of_the_grace(log: JobLog) -> None:
    """But a request that fails now and then does not make it begin again."""
    log.store.create("roster/1", b'["r1", 1]')
    log._read_roster()
    log._new.clear()  # it was heard from
    log._flights[0] = one = _Flight(launched=True, messages={"r0": MESSAGE})
    now_s = time.monotonic()
    one.due_s, one.away_s, log.store.away_s = now_s - 100.0, 50.0, 250.0
    log._advance(0, one)
    assert one.commit is None
    log.store.away_s, log.store.failed_s = 140.0, now_s
    log._advance(0, one)
    assert [entry.name for entry in one.commit or ()] == ["r0"]


def test_a_newcomer_does_not_take_a_slot_because_its_owner_cannot_answer_in_an_outage(
    log: JobLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_ANSWER_S", 3.0)
    looks = 0  # of the newcomer; the owner's answer comes a little later than the first one

    def away(verb: str, key: str, request: Callable[[], Any]) -> Any:
        nonlocal looks
        if key.startswith("here/"):
            looks += verb == "get"
            if looks <= 5 or (verb == "create" and looks < 8):
                raise refused(verb)
        return request()

    log.store._store = ScriptedStore(log.store._store, away)
    log.start(0)
    assert JobLog(log.store, "r1", lambda flight: (len(MESSAGE),)).enroll(1) is None
    assert looks >= 8


# -- a store that shows late what others created


def test_a_store_that_shows_keys_late_costs_no_step() -> None:
    """Settings, roster, state, commits and messages that are listed already."""
    job = Job(MemoryStore(), 60, MANY, grace_s=60.0, step_s=0.005, state_cycles=2, min_replicas=2)
    rules = [Eventual(2) for _ in range(3)]

    replicas = [Replica(f"r{i}", i, job, hearing(job, "r2", 50)) for i in range(2)]
    replicas.append(Replica("r2", 2, job))
    for one, rule in zip(replicas, rules, strict=True):
        one.store = ScriptedStore(job.store, rule)
    replicas[0].start()
    replicas[1].start()
    wait_until(lambda: len(listed_in(job.store)) > 3)
    replicas[2].start()
    play(replicas)
    assert [one.steps for one in assert_equal_the_twin(replicas)[:2]] == [60, 60]
    assert listed_in(job.store)[-1] == ["r0", "r1", "r2"]
    assert min(rule.hidden for rule in rules) > 20


def test_settings_that_another_founder_created_are_awaited(log: JobLog) -> None:
    looks = 0

    def late(verb: str, key: str, request: Callable[[], Any]) -> Any:
        nonlocal looks
        looks += (verb, key) == ("get", "config")
        return None if (verb, key) == ("get", "config") and looks < 4 else request()

    other = JobLog(ScriptedStore(log.store, late), "r1", lambda flight: (len(MESSAGE),))
    other.begin({}, lambda: b"another state")
    assert looks == 4
    assert other.newest_state() == (-1, b"state")


def test_a_listed_message_that_is_not_visible_yet_is_awaited(log: JobLog) -> None:
    looks = 0

    def late(verb: str, key: str, request: Callable[[], Any]) -> Any:
        nonlocal looks
        if (verb, key) == ("get", "x/0/r1"):
            looks += 1
            return None if looks < 5 else request()
        return request()

    log.store._store = ScriptedStore(log.store._store, late)
    log.store.create("roster/1", b'["r1", 1]')
    log.store.create("x/0/r1", MESSAGE)
    log.store.create("commit/0", f"[{entry_of('r1')}]".encode())
    log.start(0)
    landed = log.landed(log.launch())
    assert landed.objects == [[b"0123456789"]]
    assert looks == 5


def test_a_replica_that_was_stopped_does_not_turn_the_head_back(log: JobLog) -> None:
    for flight in (7, 3, 11):
        log._point_to(flight)
        log.states.create(str(flight), b"%d" % flight, log.ranks.gather)
        assert log.newest_state()[0] == max(7, flight)


def test_a_stale_head_stops_nobody(log: JobLog) -> None:
    """A replica that was stopped between its look at the head and its write set it back."""
    log.store.overwrite("head", b"1")
    log.states.create("7", b"seven", log.ranks.gather)
    assert log.newest_state() == (7, b"seven")
    log.states.create("end", b"final", log.ranks.gather)
    assert log.newest_state() == (7, b"seven"), "nobody has written `end` yet"
    log.store.create("roster/1", b'["r1", 1]')
    log.store.create("commit/0", f"[{entry_of('r1')}]".encode())  # x/0/r1 was deleted
    log.store.overwrite("head", b"-1")
    log.store.create("end", b"12")
    assert log.newest_state() == (11, b"final")
    log.start(0)
    with pytest.raises(MissedError):
        log.landed(log.launch())


# -- kills


def dying(replica: Replica, verb: str, prefix: str, carried_out: bool, dead: list[Replica]) -> Rule:
    """The first replica that makes a request of a kind dies at it.

    It reads others' messages also before it has sent its own; then it does not die yet.
    """
    lock = threading.Lock()

    def rule(asked: str, key: str, request: Callable[[], Any]) -> Any:
        if replica.killed:
            raise refused(asked)
        if asked != verb or not key.startswith(prefix):
            return request()
        if verb == "get" and prefix + replica.name not in replica.job.store.objects:
            return request()
        with lock:
            if not dead:
                dead.append(replica)
        if replica not in dead:
            return request()
        if carried_out:
            request()
        replica.kill()
        raise refused(asked)

    return rule


@pytest.mark.parametrize(
    ("verb", "prefix", "carried_out", "wire_dtype"),
    [
        ("create", "x/4/", False, "fp32"),
        ("create", "x/4/", True, "int2"),  # and its answer is lost
        ("create", "commit/4", False, "bf16"),  # between message and commit
        ("create", "commit/4", True, "fp4"),  # before it knows that the commit is its own
        ("get", "x/4/", False, "int8"),
    ],
)
def test_a_kill_at_each_request_of_a_flight(
    verb: str, prefix: str, carried_out: bool, wire_dtype: str
) -> None:
    changes = {**MANY, "wire_dtype": wire_dtype}
    job = Job(MemoryStore(), 60, changes, grace_s=0.5, step_s=0.005, min_replicas=3)
    dead: list[Replica] = []

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 21:  # flight 4 lands two steps later
            wait_until(lambda: bool(dead))

    replicas = [Replica(f"r{i}", i, job, wait) for i in range(3)]
    for one in replicas:
        one.store = ScriptedStore(job.store, dying(one, verb, prefix, carried_out, dead))
        one.start()
    wait_until(lambda: bool(dead))
    now_needs(2, replicas)
    again = Replica("again", dead[0].data, job).start()
    play([*replicas, again])
    assert_equal_the_twin([*replicas, again])
    assert [one.killed for one in replicas].count(True) == 1
    sent = carried_out or (verb, prefix) != ("create", "x/4/")
    listed = listed_in(job.store)
    assert (dead[0].name in listed[4]) == sent, "its steps up to its latest message count"
    assert all(dead[0].name not in names for names in listed[6:])


def test_a_job_killed_in_a_flight_counts_the_messages_of_the_dead() -> None:
    job = Job(MemoryStore(), 60, {**MANY, "wire_dtype": "int2"}, grace_s=0.5, min_replicas=2)
    first = [Replica(f"r{i}", i, job) for i in range(2)]

    def rule(verb: str, key: str, request: Callable[[], Any]) -> Any:
        if key == "commit/4" and verb == "create":
            for one in first:
                one.kill()
        if any(one.killed for one in first):
            raise refused(verb)
        return request()

    for one in first:
        one.store = ScriptedStore(job.store, rule)
        one.start()
    play(first)
    assert "commit/4" not in job.store.objects
    second = [Replica(f"again{i}", i, job).start() for i in range(2)]
    play(second)
    assert_equal_the_twin([*first, *second])
    assert {"r0", "r1"} <= {*listed_in(job.store)[4]}


# -- stops


class Stop:
    """Rule: r1 stops at a request of flight 4, as by SIGSTOP, until it is `awake`."""

    def __init__(self, verb: str, key: str, carried_out: bool, objects: dict[str, bytes]) -> None:
        self.at, self.carried_out, self.objects = (verb, key), carried_out, objects
        self.stopped, self.awake = threading.Event(), threading.Event()

    def __call__(self, verb: str, key: str, request: Callable[[], Any]) -> Any:
        if (verb, key) != self.at or "x/4/r1" not in self.objects:
            self.sleep()
            return request()
        found = request() if self.carried_out else None
        self.stopped.set()
        self.sleep()
        return found if self.carried_out else request()

    def sleep(self, *_: Any) -> None:
        if self.stopped.is_set():
            self.awake.wait(30)

    def hold(self, verb: str, key: str, request: Callable[[], Any]) -> Any:
        """Rule for r0: its message comes after r1's, and its commit after r1's stop."""
        if (verb, key) == ("create", "x/4/r0"):
            wait_until(lambda: "x/4/r1" in self.objects)
        if (verb, key) == ("create", "commit/4"):
            self.stopped.wait(30)
        return request()


@pytest.mark.parametrize(
    ("verb", "key", "carried_out", "deleted", "wire_dtype"),
    [
        ("create", "commit/4", False, False, "int2"),
        ("create", "commit/4", True, False, "fp32"),
        ("create", "commit/4", False, True, "fp4"),
        ("create", "commit/4", True, True, "bf16"),
        ("get", "x/4/r0", False, True, "int2"),  # others have counted its message
    ],
)
def test_a_stop_in_a_flight(
    verb: str, key: str, carried_out: bool, deleted: bool, wire_dtype: str
) -> None:
    """Until the others have gone on or have deleted messages."""
    job = Job(MemoryStore(), 120, {**MANY, "wire_dtype": wire_dtype}, grace_s=0.3, step_s=0.004)
    job.min_replicas, job.state_cycles = 2, 1 if deleted else 8
    stop = Stop(verb, key, carried_out, job.store.objects)

    def goes_on(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 60:
            wait_until(lambda: not deleted or "x/4/r0" in job.store.deleted)
            stop.awake.set()
        hearing(job, "r1", 90)(diloco, step)

    replicas = [
        Replica("r0", 0, job, goes_on, store=ScriptedStore(job.store, stop.hold)).start(),
        Replica("r1", 1, job, stop.sleep, store=ScriptedStore(job.store, stop)).start(),
    ]
    wait_until(stop.stopped.is_set)
    now_needs(1, replicas)
    play(replicas)
    assert_equal_the_twin(replicas)
    assert listed_in(job.store)[4] == ["r0", "r1"]
    assert ["r0"] in listed_in(job.store)
    assert any("r1" in names for names in listed_in(job.store)[20:]), "it came back"
    states = [event for event in replicas[1].events if event[0] == "state" and event[1] >= 0]
    assert bool(states) == deleted


def test_a_slower_replica_that_was_left_out_comes_back() -> None:
    """It begins its exchanges when the others do, and skips the steps for which it is too slow."""
    job = Job(MemoryStore(), 300, MANY, grace_s=0.5, step_s=0.01)

    def slower(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            wait_until(lambda: listed_in(job.store)[5:].count(["r0"]) >= 12)
        time.sleep(0.02)

    replicas = [Replica("r0", 0, job).start(), Replica("r1", 1, job, slower).start()]
    play(replicas)
    assert_equal_the_twin(replicas)
    assert sum("r1" in names for names in listed_in(job.store)[20:]) > 20


def entry_of(name: str) -> str:
    return f'["{name}", {len(MESSAGE)}]'


def test_nobody_waits_for_a_newcomer_before_its_first_message(log: JobLog) -> None:
    log._latest_flight = log.launched = 30
    log.store.create("roster/1", b'["r1", 1]')
    log._read_roster()
    assert log._group(31) == ({"r0"}, {"r0", "r1"})
    log._hear(31, {"r1": b"9876543210"})
    assert log._group(32).expected == {"r0", "r1"}
    assert log._group(51).possible == {"r0"}, "it is silent"
    assert log._group(60).possible == {"r0", "r1"}, "it may be back"


def test_founders_that_begin_one_after_the_other_wait_for_each_other(log: JobLog) -> None:
    log.store.create("roster/1", b'["r1", 1]')
    log._read_roster()
    assert log._group(0).expected == log._group(1).expected == {"r0", "r1"}
    assert log._group(2).expected == {"r0"}, "for one or two exchanges"


# -- races


def test_two_join_at_once_for_one_free_slot(log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_ANSWER_S", 5.0)
    both, won = threading.Barrier(2), threading.Event()

    def race(verb: str, key: str, request: Callable[[], Any]) -> Any:
        if verb == "create" and key == "roster/1":
            both.wait(30)
        if verb == "create" and key == "roster/2":
            won.wait(30)  # the question of the other one: the winner must be there to answer
        return request()

    members: list[Member | None] = []
    log.start(0)
    logs = [
        JobLog(ScriptedStore(log.store, race), name, lambda flight: (len(MESSAGE),))
        for name in ("r1", "r2")
    ]

    def join(one: JobLog) -> None:
        members.append(one.enroll(2))
        if members[-1] is not None:
            one.start(0)
            won.set()

    threads = [threading.Thread(target=join, args=(one,)) for one in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in logs:
        one.leave(0.0)
        one.close()
    assert members[1] is None
    assert members[0] is not None
    assert members[0].slot == 1


def test_two_commits_at_once_without_each_other_are_one() -> None:
    """With no grace, each of two replicas wants to commit only itself."""
    job = Job(MemoryStore(), 40, {**MANY, "wire_dtype": "bf16"}, grace_s=0.0)
    barriers = [threading.Barrier(2) for _ in range(4)]

    def race(name: str) -> Rule:
        def rule(verb: str, key: str, request: Callable[[], Any]) -> Any:
            kind, _, rest = key.partition("/")
            flight = rest.partition("/")[0]
            if kind == "x" and verb == "get" and int(flight) < 4 and not key.endswith(name):
                return request() if f"commit/{flight}" in job.store.objects else None
            if kind == "commit" and verb == "create" and int(flight) < 4:
                barriers[int(flight)].wait(30)
            return request()

        return rule

    replicas = [Replica(f"r{i}", i, job) for i in range(2)]
    for one in replicas:
        one.store = ScriptedStore(job.store, race(one.name))
        one.start()
    play(replicas)
    assert_equal_the_twin(replicas)
    assert all(len(names) == 1 for names in listed_in(job.store)[:4])


# -- NaN


@pytest.mark.parametrize("wire_dtype", ["int2", "fp4"])
def test_a_replica_with_nan_equals_its_twin(wire_dtype: str) -> None:
    changes = {**MANY, "nonfinite": "abstain", "wire_dtype": wire_dtype}
    job = Job(MemoryStore(), 60, changes, grace_s=60.0, min_replicas=2)
    replicas = [Replica(f"r{i}", i, job) for i in range(2)]

    def poison(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            replicas[1].poison(diloco, 1)

    replicas[1].act = poison
    for one in replicas:
        one.start()
    with pytest.warns(UserWarning, match="This replica was left out of the mean"):
        play(replicas)
    twins = assert_equal_the_twin(replicas)
    assert [one.steps for one in twins] == [60, 60]
    assert ["r0"] in listed_in(job.store)
    assert listed_in(job.store)[-1] == ["r0", "r1"]


# -- what failed in another design


def test_newcomers_join_between_rare_exchanges() -> None:
    """Before the first exchange and between two of them; the job is not over for them."""
    changes = {"sync_every": 30, "num_fragments": 1, "overlap_steps": 2}
    job = Job(MemoryStore(), 100, changes, grace_s=60.0, step_s=0.05)

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if key := {10: "roster/1", 29: "x/0/r1", 40: "roster/2", 59: "x/1/r2"}.get(step):
            wait_until(lambda: key in job.store.objects)

    first = Replica("r0", 0, job, wait).start()
    wait_until(lambda: bool(job.store.list("roster/")))
    second = Replica("r1", 1, job).start()
    wait_until(lambda: bool(job.store.list("commit/")))
    third = Replica("r2", 2, job).start()
    play([first, second, third])
    assert_equal_the_twin([first, second, third])
    assert listed_in(job.store)[:2] == [["r0", "r1"], ["r0", "r1", "r2"]]


def test_who_leaves_in_an_outage_exits_as_after_sigterm(log: JobLog) -> None:
    """Not with the error of a thread whose request was not repeated any more."""
    log.start(0)
    flight = log.launch()
    for store in (log.store, log.states.store):
        store._store = ScriptedStore(store._store, lambda verb, *_: fail(verb))
    log.leave(0.0)
    log.later(lambda: log.store.get("head"))
    log.write_state(0, lambda: b"state", 1)
    for thread in log._threads:
        thread.join()
    with pytest.raises(LeftError) as raised:
        log.landed(flight)
    assert raised.value.code == 143


def test_a_job_whose_states_cannot_be_stored_does_not_end_in_silence(log: JobLog) -> None:
    def fails() -> bytes:
        raise ValueError("no state")

    log.start(0)
    log.write_state(0, fails, 1)
    with pytest.raises(RuntimeError, match="A thread that uses memory has ended") as raised:
        log.write_final_state(1, lambda: b"final")
    assert str(raised.value.__cause__) == "no state"
    assert log.end() < 0


def test_who_leaves_in_an_outage_while_joining_exits_as_after_sigterm(log: JobLog) -> None:
    joiner = JobLog(
        ScriptedStore(log.store, lambda verb, *_: fail(verb)), "r1", lambda _: (len(MESSAGE),)
    )
    joiner.leave(0.0)
    for join in (lambda: joiner.begin({}, lambda: b""), lambda: joiner.enroll(2), joiner.end):
        with pytest.raises(LeftError):
            join()


def fail(verb: str) -> Any:
    raise refused(verb)
