"""Outer states of an elastic job in its store: in parts, of several writers, and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_commfree.elastic import states as states_module
from lightning_commfree.elastic.log import JobLog, Member
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.elastic.states import States
from lightning_commfree.stores.objects import PIECE_BYTES
from lightning_commfree.stores.retrying import Retrying
from tests.elastic.log_twin import Job, Replica, assert_equal_the_twin, play, state_in
from tests.elastic.memory_store import MemoryStore
from tests.elastic.scripted_store import ScriptedStore, refused

pytestmark = pytest.mark.usefixtures("turns")

EVERY = 4  # flights between two states


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "PART_BYTES", 4)


def alone(value: int) -> list[int]:
    """Gather the values of a replica of one rank."""
    return [value]


def states_of(store: MemoryStore, name: str) -> States:
    return States(Retrying(store), name, ReplicaRanks())


def test_a_state_is_complete_when_all_its_parts_are_there() -> None:
    store = MemoryStore()
    seen: list[Any] = []

    def gather(value: int) -> list[int]:
        seen.append((other.read("3"), other.is_complete("3"), sorted(store.objects)))
        return [value]

    other = states_of(store, "r1")
    states_of(store, "r0").create("3", b"0123456789", gather)
    parts = [f"part/3.r0.0.{i}" for i in range(3)]
    assert seen == [(None, False, []), (None, False, parts)]
    assert other.is_complete("3")
    assert other.read("3") == b"0123456789" == state_in(store, "3")


def test_the_first_that_completes_a_state_wins() -> None:
    store = MemoryStore()

    def gather(value: int) -> list[int]:
        states_of(store, "r1").create("end", b"another state", alone)
        return [value]

    states_of(store, "r0").create("end", b"0123456789", gather)
    assert states_of(store, "r2").read("end") == b"another state"
    assert [key for key in store.objects if ".r0." in key] == []
    states_of(store, "r2").create("end", b"a third one", alone)
    assert [key for key in store.objects if ".r2." in key] == [], "nothing was sent"


def test_a_state_whose_record_is_shown_late_keeps_its_parts() -> None:
    """The answer to the request that created it was lost, and the store shows it only later."""
    store = MemoryStore()

    def rule(verb: str, key: str, request: Callable[[], Any]) -> Any:
        if verb == "create" and key == "state/3":
            request()
            return False
        return None if verb == "get" and key == "state/3" else request()

    late = States(Retrying(ScriptedStore(store, rule)), "r0", ReplicaRanks())
    late.create("3", b"0123456789", alone)
    assert states_of(store, "r1").read("3") == b"0123456789"


def test_a_part_with_its_seal_is_one_request_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    store = MemoryStore()
    states_of(store, "r0").create("3", bytes(states_module.PART_BYTES), alone)
    assert len(store.objects["part/3.r0.0.0"]) == PIECE_BYTES


def test_a_state_that_is_being_deleted_is_none() -> None:
    store = MemoryStore()
    states = states_of(store, "r0")
    states.create("3", b"0123456789", alone)
    del store.objects["part/3.r0.0.2"]
    assert states.read("3") is None


def test_a_damaged_part_is_named() -> None:
    store = MemoryStore()
    states = states_of(store, "r0")
    states.create("3", b"0123456789", alone)
    store.objects["part/3.r0.0.1"] = store.objects["part/3.r0.0.0"][:-1]
    with pytest.raises(ValueError, match=r"The object part/3\.r0\.0\.1 in memory is damaged"):
        states.read("3")


class Writers:
    """Replicas that store states in turn, and what the store has after them."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.logs = {
            name: JobLog(self.store, name, lambda flight: (10,)) for name in ("r0", "r1", "r2")
        }
        for log in self.logs.values():
            log.begin({}, lambda: b"the first state")
            log.roster = [Member(name, slot) for slot, name in enumerate(self.logs)]
        for flight in range(40):
            for name in self.logs:
                self.store.create(f"x/{flight}/{name}", b"message")

    def put(self, name: str, flight: int) -> None:
        self.logs[name].states.create(str(flight), b"a state", alone)

    def write(self, name: str, flight: int) -> None:
        self.put(name, flight)
        self.logs[name]._point_to(flight)
        self.logs[name]._delete_old(flight, EVERY)

    @property
    def kept(self) -> list[int]:
        """The flights of states that the store has, complete or not; -1 is the first state."""
        keys = [*self.store.list("state/"), *self.store.list("part/")]
        names = {key.split("/")[1].split(".")[0] for key in keys}
        return sorted(-1 if name == "r0" else int(name) for name in names)

    @property
    def messages_from(self) -> int:
        """The first flight that has messages; all later ones must have them, too."""
        flights = {int(key.split("/")[1]) for key in self.store.list("x/")}
        assert flights == set(range(min(flights), 40))
        return min(flights)


def test_the_latest_two_states_are_kept_and_the_messages_after_the_first_of_them() -> None:
    job = Writers()
    for flight, name in zip(range(3, 40, EVERY), ["r0", "r0", "r1", "r2"] * 3, strict=False):
        job.write(name, flight)
        assert job.kept == [flight - EVERY, flight]
        assert job.messages_from == max(flight - EVERY + 1, 0)


def test_a_state_that_was_left_out_leaves_nothing_behind() -> None:
    job = Writers()
    for flight in (3, 7, 19, 31, 35):
        job.write("r0", flight)
    assert (job.kept, job.messages_from) == ([31, 35], 32)


def test_a_late_state_of_another_writer_leaves_nothing_behind() -> None:
    job = Writers()
    for flight, name in ((3, "r0"), (11, "r1"), (7, "r0"), (15, "r1")):
        job.write(name, flight)
    assert (job.kept, job.messages_from) == ([11, 15], 12)
    # two newer ones are there when it comes
    job.write("r0", 23)
    job.write("r1", 27)
    job.write("r2", 19)
    assert (job.kept, job.messages_from) == ([23, 27], 24)


def test_parts_that_came_after_the_others_had_deleted_the_state_are_deleted() -> None:
    job = Writers()
    job.write("r0", 3)
    job.put("r1", 7)
    late = {key: data for key, data in job.store.objects.items() if "7" in key}
    for key in late:
        job.store.delete(key)
    for flight in (11, 15, 19):
        job.write("r0", flight)
    parts = sorted(key for key in late if key.startswith("part/"))
    for key in (parts[-1], "state/7"):  # the first part is not there any more
        job.store.create(key, late[key])
    job.logs["r1"]._delete_old(7, EVERY)
    assert job.kept == [15, 19]


def test_a_late_state_that_is_one_of_the_latest_two_is_kept() -> None:
    job = Writers()
    for flight in (3, 7, 15):
        job.write("r0", flight)
    job.put("r1", 19)
    job.write("r0", 23)  # before r1 has looked what is old
    job.logs["r1"]._delete_old(19, EVERY)
    assert (job.kept, job.messages_from) == ([19, 23], 20)


def test_nothing_remains_of_a_state_whose_writer_was_killed() -> None:
    job = Writers()
    job.write("r0", 3)
    for i in range(2):
        job.store.create(f"part/7.r1.0.{i}", b"a part")
    for flight in (11, 15, 19):
        job.write("r2", flight)
    assert (job.kept, job.messages_from) == ([15, 19], 16)


def test_what_one_writer_did_not_delete_the_next_one_does() -> None:
    """A replica may be killed at any request, also while it deletes."""
    job = Writers()
    job.write("r0", 3)
    job.write("r0", 7)
    job.put("r0", 11)  # and it is killed before it has deleted anything
    job.write("r1", 15)
    assert (job.kept, job.messages_from) == ([11, 15], 12)


class Mortal:
    """Rule: the replica that stores a state dies at its third part."""

    def __init__(self, replica: Replica, dead: list[Replica], carried_out: bool) -> None:
        self.replica, self.dead, self.carried_out = replica, dead, carried_out

    def __call__(self, verb: str, key: str, request: Callable[[], Any]) -> Any:
        third = f"part/8.{self.replica.name}.0.2"
        if (verb, key) == ("create", third) and not self.dead:
            self.dead.append(self.replica)
            if self.carried_out:
                request()
            self.replica.kill()
        if self.replica.killed:
            raise refused(verb)
        return request()


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_job_goes_on_when_the_writer_of_a_state_is_killed(
    carried_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module, "PART_BYTES", 1000)
    changes = {"sync_every": 8, "num_fragments": 3, "overlap_steps": 2}
    job = Job(MemoryStore(), 120, changes, grace_s=0.2, step_s=0.01, state_cycles=1)
    dead: list[Replica] = []
    replicas = [Replica(f"r{i}", i, job) for i in range(3)]
    for one in replicas:
        one.store = ScriptedStore(job.store, Mortal(one, dead, carried_out))
        one.start()
    play(replicas)
    assert [twin.steps for twin in assert_equal_the_twin(replicas)].count(120) == 2
    (killed,) = dead
    stored = [key for key in job.store.deleted if key.startswith(f"part/8.{killed.name}.")]
    assert len(stored) == 2 + carried_out
    assert [key for key in job.store.objects if key.startswith("part/8.")] == []
