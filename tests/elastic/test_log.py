"""Streaming DiLoCo on a job's log, compared with the serial twin and with a replay of the log."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from commfree_planner.store import STATE_BYTES
from lightning_commfree.elastic import log as log_module
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.log import (
    ABSTAINS,
    LEAVES,
    JobLog,
    LeftError,
    Member,
    PostponedError,
    _Flight,
)
from lightning_commfree.elastic.parts import sealed
from lightning_commfree.elastic.processes import this_process
from tests.diloco.training import Run, assert_same_bits, twin
from tests.elastic.log_twin import (
    Job,
    LogTwin,
    Replica,
    assert_equal_the_twin,
    killing,
    listed_in,
    play,
    ranks_of,
    state_in,
    wait_until,
)
from tests.elastic.memory_store import MemoryStore, RecordingStore
from tests.elastic.scripted_store import ScriptedStore
from tests.stores.faulty_store import FaultyStore

pytestmark = pytest.mark.usefixtures("turns")

FEW = {"sync_every": 8, "num_fragments": 3}
MESSAGE = sealed([b"0123456789"])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("changes", [{"overlap_steps": 0}, FEW | {"overlap_steps": 5}], ids=str)
@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
def test_without_failures_it_equals_streaming_diloco(
    size: int, changes: dict[str, Any], wire_dtype: str
) -> None:
    changes = {**changes, "wire_dtype": wire_dtype}
    job = Job(MemoryStore(), 26, changes, grace_s=30.0, min_replicas=size)
    replicas = [Replica(f"r{i}", i, job).start() for i in range(size)]
    play(replicas)
    names = LogTwin(replicas[0]).names
    for replica, expected in zip(replicas, twin(size, Run(26, changes), names), strict=True):
        assert_same_bits(replica.trace, expected, replica.name)
    assert all(len(one) == size for one in listed_in(job.store))


@pytest.mark.parametrize("wire_dtype", ["fp4", "int8"])
def test_blocks_of_fragments_equal_the_twin(wire_dtype: str) -> None:
    job = Job(MemoryStore(), changes=FEW | {"wire_dtype": wire_dtype}, min_replicas=2)
    replicas = [Replica(f"r{i}", i, job).start() for i in range(2)]
    play(replicas)
    assert [one.messages for one in assert_equal_the_twin(replicas)] == [13, 13]


def waiting(at: int, store: MemoryStore, *names: str) -> Any:
    """Return what makes a replica wait, after a step, for messages of others."""

    def sent(name: str) -> bool:
        return any(key.endswith(f"/{name}") for key in store.list("x/"))

    def act(diloco: ElasticDiLoCo, step: int) -> None:
        if step == at:
            wait_until(lambda: all(map(sent, names)))

    return act


def test_a_kill_costs_one_grace_and_a_restart_joins() -> None:
    job = Job(MemoryStore(), 160, FEW, step_s=0.02, min_replicas=2)

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 8:  # flight 0 has been launched
            wait_until(lambda: "x/0/r2" in job.store.objects)
        if step == 60:
            wait_until(lambda: any(key.endswith("/r2-again") for key in job.store.list("x/")))

    replicas = [Replica(f"r{i}", i, job, wait).start() for i in (0, 1)]
    replicas.append(Replica("r2", 2, job, killing(20)).start())
    replicas[2].thread.join()
    # a restart within the grace would be listed in the flight that r2 has missed
    wait_until(lambda: ["r0", "r1"] in listed_in(job.store))
    replicas.append(Replica("r2-again", 2, job).start())
    play(replicas)
    assert_equal_the_twin(replicas)
    listed = listed_in(job.store)
    assert any("r2" in names for names in listed)
    assert ["r0", "r1"] in listed
    assert any("r2-again" in names for names in listed)


LONG = {"sync_every": 24, "num_fragments": 2, "overlap_steps": 5}  # a flight every 12 steps


def test_a_joiner_is_in_time_if_nobody_waits_for_it() -> None:
    """It begins in the middle between two launches, and overlap and grace are shorter than that."""
    joiner: list[Replica] = []

    def start(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 44:
            joiner.append(Replica("r1", 1, job).start())

    job = Job(MemoryStore(), 160, LONG, grace_s=0.05, step_s=0.03)
    founder = Replica("r0", 0, job, start).start()
    wait_until(lambda: bool(joiner))
    play([founder, *joiner])
    assert_equal_the_twin([founder, *joiner])
    listed = listed_in(job.store)
    assert listed[:2] == [["r0"], ["r0"]]
    assert listed[4:].count(["r0", "r1"]) >= len(listed[4:]) - 1


@pytest.mark.parametrize("missed", [3, 13])
def test_a_sleeper_is_in_time_again_if_nobody_waits_for_it(missed: int) -> None:
    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 50:  # after two flights
            wait_until(lambda: f"commit/{2 + missed}" in job.store.objects)
            time.sleep(6 * job.step_s)

    job = Job(MemoryStore(), 480, LONG, grace_s=0.05, step_s=0.015)
    replicas = [Replica("r0", 0, job).start(), Replica("r1", 1, job, sleep).start()]
    play(replicas)
    assert_equal_the_twin(replicas)
    listed = listed_in(job.store)
    assert ["r0"] in listed
    assert listed[-5:] == [["r0", "r1"]] * 5


def test_two_join_at_once_in_different_slots() -> None:
    job = Job(MemoryStore(), 160, FEW, step_s=0.02)
    replicas = [Replica("r0", 0, job, waiting(40, job.store, "r1", "r2")).start()]
    wait_until(lambda: bool(job.store.list("commit/")))
    replicas += [Replica(f"r{i}", i, job).start() for i in (1, 2)]
    play(replicas)
    assert_equal_the_twin(replicas)
    listed = listed_in(job.store)
    assert listed[0] == ["r0"]
    assert {name for names in listed for name in names} == {"r0", "r1", "r2"}
    roster = [json.loads(job.store.objects[key]) for key in job.store.list("roster/")]
    # one that is not listed at once enters again
    assert sorted(slot for _, slot, *_ in {*map(tuple, roster)}) == [0, 1, 2]


def test_a_late_replica_keeps_its_outer_gradient() -> None:
    awake = threading.Event()

    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:  # its next flight is the sixth, number 5
            # late by one flight, it would skip no steps; r0 may also have begun alone
            wait_until(lambda: listed_in(job.store)[5:].count(["r0"]) == 3)
            awake.set()

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 60:
            awake.wait(30)

    job = Job(MemoryStore(), 160, FEW, grace_s=0.2, step_s=0.02)
    replicas = [Replica("r0", 0, job, wait).start(), Replica("r1", 1, job, sleep).start()]
    play(replicas)
    slow = assert_equal_the_twin(replicas)[1]
    assert slow.steps < 160  # the twin compares the weights of its messages


def test_the_last_round_waits_longer_for_a_late_replica() -> None:
    """It is not in the latest commits, and would lose its steps since then."""

    together = threading.Barrier(2)

    def begin(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 6:
            together.wait(30)

    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        begin(diloco, step)
        if step == 40:
            wait_until(lambda: "x/21/r0" in job.store.objects)  # flights 0 to 18, then 21 to 23

    job = Job(MemoryStore(), 56, FEW, grace_s=2.0, step_s=0.01)
    replicas = [Replica("r0", 0, job, begin).start(), Replica("r1", 1, job, sleep).start()]
    play(replicas)
    assert_equal_the_twin(replicas)
    listed = listed_in(job.store)
    assert ["r0"] in listed
    assert listed[-3:] == [["r0", "r1"]] * 3


def test_a_job_that_died_as_a_whole_continues_from_the_log() -> None:
    job = Job(MemoryStore(), 80, FEW, step_s=0.01)
    first = [Replica(f"r{i}", i, job, killing(40)).start() for i in (0, 1)]
    play(first)
    flights = len(listed_in(job.store))
    second = [Replica(f"r{i}-again", i, job).start() for i in (0, 1)]
    play(second)
    assert_equal_the_twin([*first, *second])
    assert 0 < flights < len(listed_in(job.store))
    assert all(replica.final is not None for replica in second)


def test_a_replica_with_nan_is_not_listed_and_comes_back() -> None:
    def poison(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            with torch.no_grad():
                next(iter(diloco.fragments[0].local)).fill_(torch.nan)

    job = Job(MemoryStore(), 60, FEW | {"nonfinite": "abstain"}, min_replicas=2, step_s=0.01)
    replicas = [Replica("r0", 0, job).start(), Replica("r1", 1, job, poison).start()]
    play(replicas)
    listed = listed_in(job.store)
    assert ["r0"] in listed
    assert listed[-1] == ["r0", "r1"]
    assert ABSTAINS in job.store.objects.values()
    LogTwin(replicas[0]).replay()


def test_nan_in_all_replicas_is_an_error_on_all() -> None:
    def poison(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 12:
            with torch.no_grad():
                for local in diloco.fragments[0].local:
                    local.fill_(torch.nan)

    job = Job(MemoryStore(), 60, FEW | {"nonfinite": "abstain"}, min_replicas=2)
    replicas = [Replica(f"r{i}", i, job, poison).start() for i in (0, 1)]
    for replica in replicas:
        with pytest.raises(RuntimeError, match="No replica has finite values"):
            play([replica])


def test_two_that_race_to_commit_take_the_first_one() -> None:
    job = Job(MemoryStore(), 80, {"sync_every": 2, "overlap_steps": 0}, grace_s=0.0, step_s=0.01)
    replicas = [Replica(f"r{i}", i, job).start() for i in (0, 1, 2)]
    play(replicas)
    assert_equal_the_twin(replicas)


def test_a_store_that_fails_and_loses_answers_costs_no_step() -> None:
    job = Job(MemoryStore(), 60, FEW, min_replicas=2, grace_s=5.0, step_s=0.01)
    faulty = Job(FaultyStore(job.store, seed=1, refused=0.05, lost=0.05), 60, FEW, grace_s=30.0)
    faulty.min_replicas, faulty.step_s = 2, 0.01
    replicas = [Replica(f"r{i}", i, faulty).start() for i in (0, 1)]
    play(replicas)
    for replica in replicas:
        replica.job = job
    assert [one.steps for one in assert_equal_the_twin(replicas)] == [60, 60]


def test_a_sleeper_continues_from_a_state_when_messages_are_deleted() -> None:
    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 10:
            time.sleep(3.0)

    job = Job(MemoryStore(), 200, FEW, grace_s=0.1, step_s=0.02, state_cycles=1)
    replicas = [Replica("r0", 0, job).start(), Replica("r1", 1, job, sleep).start()]
    play(replicas)
    sleeper = replicas[1]
    assert [event for event in sleeper.events if event[0] == "state" and event[1] >= 0]
    assert sleeper.final is not None
    assert replicas[0].final is not None
    for name, tensor in sleeper.final.items():
        assert torch.equal(tensor, replicas[0].final[name])
    states = job.store.list("state/")
    assert len(states) <= 4, "the first one, the last one, and the latest two"
    state = torch.load(io.BytesIO(state_in(job.store, "11")), weights_only=True)
    sizes = [leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    numel = sum(tensor.numel() for tensor in sleeper.final.values())
    assert sum(sizes) == STATE_BYTES * numel, "as the planner counts it"
    assert len(job.store.list("x/")) < len(job.store.list("commit/"))


@pytest.mark.parametrize(("ranks", "cycles"), [(1, 3), (2, 3), (1, 5)])
def test_a_state_that_takes_long_delays_no_message(
    ranks: int, cycles: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The state is 16 times a message in fp4: on a slow link it takes several cycles."""
    created_s: list[float] = []

    def rule(verb: str, key: str, request: Callable[[], Any]) -> Any:
        if verb == "create" and re.match(r"part/\d+\.\w+\.0\.", key):
            time.sleep((cycles - 0.5) * cycle_s)
            created_s.append(time.monotonic())
        return request()

    cycle_s = FEW["sync_every"] * 0.02
    job = Job(MemoryStore(), 200, FEW, grace_s=0.1, step_s=0.02, state_cycles=1, ranks=ranks)
    replicas = [one for i in range(2) for one in ranks_of(f"r{i}", i, job)]
    for one in replicas:
        one.store = ScriptedStore(job.store, rule)
        one.start()
    play(replicas)
    assert_equal_the_twin(replicas)
    listed = listed_in(job.store)
    assert listed == [["r0", "r1"]] * len(listed)
    # the next one begins when it is due: those between are left out
    pauses_s = [after - before for before, after in pairwise(created_s)]
    assert pauses_s == [pytest.approx(cycles * cycle_s, abs=0.05)] * len(pauses_s)
    assert len(pauses_s) > 2
    assert caplog.text.count("Storing the outer state takes") == (cycles > 3)
    # messages are kept since the state before the latest one
    kept = {int(key.split("/")[1]) for key in job.store.list("x/")}
    assert len(kept) <= 2 * (cycles + 1) * FEW["num_fragments"]
    assert len(job.store.list("state/")) <= 4
    assert len(job.store.list("part/")) <= 4 * ranks


class Stopping(RecordingStore):
    """A store of a process that may be stopped."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.running = threading.Event()
        self.running.set()

    def note(self, verb: str, key: str, ask: Callable[..., Any], *data: bytes) -> Any:
        self.running.wait(30)
        return super().note(verb, key, ask, *data)


def test_a_message_that_counted_before_messages_were_deleted_does_not_count_again() -> None:
    store, stopped, back = MemoryStore(), threading.Event(), threading.Event()
    own = Stopping(store)

    def stop(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 10:  # flight 1 has been launched
            wait_until(lambda: "x/1/r1" in store.objects)
            own.running.clear()
            stopped.set()
            wait_until(lambda: "x/1/r1" in store.deleted)
            own.running.set()
        elif step == 11:
            back.set()

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step in (9, 80):
            assert (stopped if step == 9 else back).wait(30)

    jobs = [Job(one, 120, FEW, 0.1, step_s=0.01, state_cycles=1) for one in (store, own)]
    replicas = [Replica("r0", 0, jobs[0], wait).start(), Replica("r1", 1, jobs[1], stop).start()]
    play(replicas)
    assert "r1" in listed_in(store)[1]
    replicas[1].job = jobs[0]
    assert_equal_the_twin(replicas)


class Keeping(MemoryStore):
    """Deletes nothing."""

    def delete(self, key: str) -> None:
        pass


@pytest.mark.parametrize("missed", [40, 80])
def test_a_long_sleeper_reads_a_state_and_few_flights(missed: int) -> None:
    store = Keeping()
    caught_up, awake_at = threading.Event(), 3 * missed  # steps; three flights in eight
    own = RecordingStore(store)
    read: list[int] = []  # what it has read, before and after

    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            wait_until(lambda: f"commit/{missed}" in store.objects)
        if step in (20, 21):
            read.append(len(own.those("get", "x/")) + len(own.those("get", "commit/")))
        if step == 21:
            caught_up.set()

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step == awake_at:
            assert caught_up.wait(30)

    jobs = [Job(one, awake_at + 40, FEW, grace_s=0.05, step_s=0.005) for one in (store, own)]
    replicas = [Replica("r0", 0, jobs[0], wait).start(), Replica("r1", 1, jobs[1], sleep).start()]
    play(replicas)
    replicas[1].job = jobs[0]
    slow = assert_equal_the_twin(replicas)[1]
    assert slow.steps < awake_at
    assert read[1] - read[0] <= 4 * 12, "a state is written every 12 flights"


def test_by_time_a_slow_replica_skips_steps() -> None:
    def slow(diloco: ElasticDiLoCo, step: int) -> None:
        time.sleep(0.04)

    job = Job(MemoryStore(), 60, FEW, grace_s=5.0, step_s=0.02, by_time=True)
    replicas = [Replica("r0", 0, job).start(), Replica("r1", 1, job, slow).start()]
    play(replicas)
    fast, slow_one = assert_equal_the_twin(replicas)
    assert fast.steps > 1.1 * slow_one.steps


@pytest.fixture
def log() -> Iterator[JobLog]:
    one = JobLog(MemoryStore(), "r0", lambda flight: (len(MESSAGE),))
    yield one
    one.leave(0.0)
    one.close()


def test_a_job_with_other_settings_is_refused(log: JobLog) -> None:
    log.begin({"sync_every": "8", "wire": "fp4"}, lambda: b"state")
    with pytest.raises(ValueError, match=r"`sync_every` is 9 here and 8 there.*another store"):
        log.begin({"sync_every": "9", "wire": "fp4"}, lambda: b"state")


def test_who_comes_after_the_end_gets_the_final_weights() -> None:
    job = Job(MemoryStore(), 20, FEW)
    first = Replica("r0", 0, job).start()
    play([first])
    late = Replica("r1", 1, job).start()
    play([late])
    assert (late.final or {}).keys() == (first.final or {"": 0}).keys()
    assert all(torch.equal(late.final[n], tensor) for n, tensor in (first.final or {}).items())
    assert not job.store.list("roster/")[1:]


def member(name: str, slot: int) -> Member:
    return Member(name, slot, process=this_process())


def test_a_slot_whose_owner_does_not_answer_is_free(
    log: JobLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_ANSWER_S", 2.0)
    log.begin({}, lambda: b"state")
    assert log.enroll(2) == member("r0", 0)
    assert log.enroll(2) == member("r0", 0)  # again, after a lost answer
    other, third = (
        JobLog(log.store, name, lambda flight: (len(MESSAGE),)) for name in ("r1", "r2")
    )
    assert other.enroll(2) == member("r1", 1)
    log.start(0)  # and `other` has died
    assert third.enroll(2) == member("r2", 1)
    third.start(0)
    late = JobLog(log.store, "r3", lambda flight: (len(MESSAGE),))
    assert late.enroll(2) is None
    third.close()


@pytest.mark.skipif(not this_process(), reason="needs /proc")
def test_the_slot_of_a_process_that_was_killed_on_this_machine_is_free_at_once(
    log: JobLog,
) -> None:
    log.begin({}, lambda: b"state")
    assert log.enroll(3) == member("r0", 0)
    *machine, began = this_process().split(" ")
    for slot, process in ((1, ""), (2, " ".join([*machine, f"{began}0"]))):
        dead = Member(f"r{slot}", slot, process=process)
        log.store.create(f"roster/{slot}", json.dumps(dead).encode())
    again = JobLog(log.store, "again", lambda flight: (len(MESSAGE),))
    assert again.enroll(3) == member("again", 2)
    assert [one.slot for one in again.roster] == [0, 1, 2, 2], "nobody was asked"


def test_a_message_of_another_size_is_not_listed(log: JobLog) -> None:
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.store.create("roster/1", json.dumps(["r1", 1]).encode())
    log.store.create("x/0/r1", b"123")
    log.start(0)
    log.send(log.launch(), lambda: MESSAGE)
    assert [member.name for member in log.landed(0).members] == ["r0"]


def test_a_damaged_message_is_an_error(log: JobLog) -> None:
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.store.create("roster/1", json.dumps(["r1", 1]).encode())
    log.store.create("x/0/r1", MESSAGE[:-1] + b"?")
    log.store.create("commit/0", json.dumps([["r1", 50]]).encode())
    log.start(0)
    log.launch()
    with pytest.raises(RuntimeError, match="thread that uses memory has ended") as raised:
        log.landed(0)
    assert "x/0/r1 in memory is damaged: a part differs" in str(raised.value.__cause__)


def test_leaving_ends_a_wait(log: JobLog) -> None:
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.start(0)
    flight = log.launch()  # nothing is sent, so nobody commits
    log.leave(0.3)
    start_s = time.monotonic()
    with pytest.raises(PostponedError):
        log.landed(flight)
    log.last_round = flight  # nobody comes back to land it
    with pytest.raises(LeftError) as raised:
        log.landed(flight)
    assert raised.value.code == 143
    assert time.monotonic() - start_s < 2.0


def test_nobody_waits_for_a_replica_that_leaves(log: JobLog) -> None:
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.store.create("roster/1", json.dumps(["r1", 1]).encode())
    log.store.create("x/0/r1", LEAVES)
    log.start(0)
    log._grace_s = 20.0
    start_s = time.monotonic()
    for _ in range(3):
        flight = log.launch()
        log.send(flight, lambda: MESSAGE)
        assert [member.name for member in log.landed(flight).members] == ["r0"]
    assert time.monotonic() - start_s < 10.0


def test_waiting_for_replicas_is_explained(
    log: JobLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_module, "_SAY_S", 0.2)
    log.min_replicas = 2
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.start(0)
    flight = log.launch()
    log.send(flight, lambda: MESSAGE)
    log.last_round = 0  # which waits after `leave`, too
    log.leave(0.5)
    with pytest.raises(LeftError):
        log.landed(flight)
    assert "1 of at least 2 replicas (`min_replicas=2`) have sent a message" in caplog.text


def test_two_threads_that_read_the_roster_append_each_entry_once(log: JobLog) -> None:
    for n in range(40):
        log.store.create(f"roster/{n}", json.dumps([f"r{n}", n]).encode())
    get = log.store.get

    def slow_get(key: str) -> bytes | None:
        data = get(key)
        time.sleep(0.001)
        return data

    log.store.get = slow_get  # type: ignore[method-assign]
    threads = [threading.Thread(target=log._read_roster) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [member.slot for member in log.roster] == list(range(40))


def test_an_older_commit_that_is_read_later_does_not_bring_the_dead_back(log: JobLog) -> None:
    log.store.create("roster/0", json.dumps(["r0", 0]).encode())
    log.store.create("roster/1", json.dumps(["r1", 1]).encode())
    for flight, names in ((3, ["r0"]), (1, ["r0", "r1"])):
        entries = [[name, 50] for name in names]
        log.store.create(f"commit/{flight}", json.dumps(entries).encode())
        log._read_commit(flight, _Flight())
    assert log._group(4).expected == {"r0"}


def test_a_commit_that_names_an_unknown_replica_is_read_again(log: JobLog) -> None:
    """An eventual store may show a commit before the roster."""
    log.store.create("commit/0", json.dumps([["r1", 50]]).encode())
    one = _Flight()
    log._read_commit(0, one)
    assert one.commit is None
    log.store.create("roster/0", json.dumps(["r1", 1]).encode())
    log._read_commit(0, one)
    assert [entry.name for entry in one.commit or ()] == ["r1"]


def test_a_flight_that_has_landed_does_not_come_back(log: JobLog) -> None:
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.start(0)
    for _ in range(100):
        flight = log.launch()
        log.send(flight, lambda: MESSAGE)
        log._watched_s = 0.0  # look for the next flight, too
        log.landed(flight)
    with log._lock:
        assert log._flights.keys() <= {log.launched}


def test_a_replica_that_was_stopped_looks_before_it_leaves_others_out(log: JobLog) -> None:
    """Its grace has run out when it continues, but the messages may be there."""
    log.begin({}, lambda: b"state")
    log.enroll(2)
    log.store.create("roster/1", json.dumps(["r1", 1]).encode())
    log._read_roster()
    log._grace_s, log._heard["r1"] = 0.5, 0
    log._new.clear()
    log._flights[0] = one = _Flight(launched=True, messages={"r0": MESSAGE})
    one.due_s = time.monotonic() - 10.0
    log.store.create("x/0/r1", sealed([b"9876543210"]))
    log._advance(0, one)
    assert [entry.name for entry in one.commit or ()] == ["r0", "r1"]
