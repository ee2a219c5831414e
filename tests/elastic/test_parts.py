"""Flights whose messages are reduced by the owners of their parts, compared with the twin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from commfree_planner.store import store_exchange
from lightning_commfree.diloco.codec import CODECS
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.parts import num_parts, opened, sealed
from lightning_commfree.stores import retrying
from tests.elastic.log_twin import (
    HEADER_BYTES,
    SEAL_BYTES,
    Job,
    Replica,
    assert_equal_the_twin,
    listed_in,
    play,
    start_ranks,
    wait_until,
)
from tests.elastic.memory_store import MemoryStore, RecordingStore
from tests.elastic.scripted_store import Rule, ScriptedStore, refused

pytestmark = pytest.mark.usefixtures("turns")

# Flights 3, 4, 5 are launched after steps 16, 18, 21 and so on, and two are in flight.
WIDE: dict[str, Any] = {"sync_every": 8, "num_fragments": 3, "overlap_steps": 5}
# Of a fragment's message: number of parts, and of values in a part. The fragments have two blocks
# of 65,792 values, one block, and 1,280 values.
PARTS, WIDTH = [(31, 17 * 256), (16, 17 * 256), (1, 1280)], 256
NUMEL = [131_584, 65_792, 1_280]  # values in a fragment


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_FIRST_PAUSE_S", 0.01)


def job_of(steps: int, size: int, wire_dtype: str = "fp4", **about: Any) -> Job:
    changes = {**WIDE, "wire_dtype": wire_dtype}
    return Job(MemoryStore(), steps, changes, min_replicas=size, width=WIDTH, **about)


def flights_of(job: Job, folder: str) -> set[int]:
    every = job.store.objects | job.store.deleted
    return {int(key.split("/")[1]) for key in every if key.startswith(f"{folder}/")}


@pytest.mark.parametrize("wire_dtype", ["fp4", "fp32"])
def test_without_failures_bytes_and_requests_are_those_of_the_formula(wire_dtype: str) -> None:
    size, by_name, forecasts = 4, {}, {}

    def note(diloco: ElasticDiLoCo, step: int) -> None:
        log = diloco.transport.log
        if step == 1:  # a replica that knows of two others only would read whole messages
            wait_until(lambda: len(log.roster) == size)
        by_name[log.name] = diloco.transport
        forecasts.setdefault(diloco.transport.log.name, diloco.bytes_per_cycle)

    job = job_of(26, size, wire_dtype, grace_s=60.0)
    replicas = [Replica(f"r{i}", i, job, note, RecordingStore(job.store)) for i in range(size)]
    for one in replicas:
        one.start()
    play(replicas)
    twins = assert_equal_the_twin(replicas)
    flights = flights_of(job, "commit")
    two_phase = {flight for flight in flights if flight % 3 != 2}
    assert flights_of(job, "y") == two_phase
    assert [one.reduced for one in twins] == [len(two_phase)] * size
    kept, codec = job.store.objects | job.store.deleted, CODECS[wire_dtype]
    sent = moved = 0
    for i, one in enumerate(replicas):
        up = down = read_up = read_down = 0
        for flight in flights:
            count, numel = PARTS[flight % 3]
            part = SEAL_BYTES + HEADER_BYTES + -(-codec.num_bytes(numel) // 8) * 8
            mean = part - HEADER_BYTES + 24  # with the norms of four members and of the mean
            assert len(kept[f"x/{flight}/{one.name}"]) == count * part
            up += count * part
            if flight not in two_phase:
                read_up += (size - 1) * count * part
                continue
            first, after = count * i // size, count * (i + 1) // size
            headers = SEAL_BYTES + size * HEADER_BYTES
            mine = (after - first) * mean + (0 if i else headers)
            down += mine
            read_up += (size - 1) * ((after - first) * part)
            read_down += count * mean + headers - mine
        assert sum(r.sent for r in one.store.those("create", "x/")) == up
        assert sum(r.sent for r in one.store.those("create", "y/")) == down
        transport = by_name[one.name]
        assert transport.view.channel.ledger.bytes_sent == up + down
        assert sum(transport.exchange(f % 3).num_bytes for f in flights) == up + down
        # of the messages, it has read what it needs once, and before that sizes, 8 bytes each
        gets, ranges = one.store.those("get", "x/"), one.store.those("get_range", "x/")
        parts = [r for r in ranges if r.received > 8]
        assert sum(r.received for r in [*gets, *parts]) == read_up
        assert len(gets) == (size - 1) * len(flights - two_phase)
        assert len({r.key for r in parts}) == len(parts) == (size - 1) * len(two_phase)
        means = one.store.those("get", "y/")
        assert sum(r.received for r in means) == read_down
        assert len(means) == len(parts)
        sent += up + down
        moved += up + down + read_up + read_down
    planned = [store_exchange(NUMEL[flight % 3], size, wire_dtype) for flight in flights]
    assert sent == size * sum(one.sent for one in planned)
    assert moved == sum(one.total for one in planned)
    # before the first exchange, `min_replicas` is all that is known; the first member is r0
    assert forecasts["r0"] == sum(by_name["r0"].exchange(p).num_bytes for p in range(3))


def dying(replica: Replica, key: str, dead: threading.Event) -> Rule:
    """The replica dies when it creates a key."""

    def rule(verb: str, asked: str, request: Callable[[], Any]) -> Any:
        if (verb, asked) == ("create", key):
            replica.kill()
            dead.set()
        if replica.killed:
            raise refused(verb)
        return request()

    return rule


@pytest.mark.parametrize("wire_dtype", ["fp4", "bf16"])
def test_an_owner_that_dies_costs_one_grace_and_its_message_counts(wire_dtype: str) -> None:
    job = job_of(60, 4, wire_dtype, grace_s=0.5, step_s=0.005, state_cycles=1)
    dead = threading.Event()
    replicas = [Replica(f"r{i}", i, job) for i in range(4)]
    replicas[1].store = ScriptedStore(job.store, dying(replicas[1], "y/4/r1", dead))
    for one in replicas:
        one.start()
    wait_until(dead.is_set)
    for one in replicas:
        assert one.log is not None
        one.log.min_replicas = 3
    play(replicas)
    assert_equal_the_twin(replicas)
    assert "y/4/r1" in job.store.objects | job.store.deleted
    listed = listed_in(job.store)
    assert listed[4] == ["r0", "r1", "r2", "r3"]
    assert listed[6:] == [["r0", "r2", "r3"]] * len(listed[6:])
    # what is older than the last two states has been deleted
    assert "y/4/r1" in job.store.deleted
    assert len({key.split("/")[1] for key in job.store.list("y/")}) < len(listed) / 2


def test_a_replica_that_was_left_out_reads_the_means_of_the_others() -> None:
    job = job_of(120, 1, grace_s=0.3, step_s=0.01)

    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            wait_until(lambda: listed_in(job.store)[5:].count(["r0", "r1", "r2"]) >= 3)

    replicas = [Replica(f"r{i}", i, job, sleep if i == 3 else lambda *_: None) for i in range(4)]
    for one in replicas:
        one.start()
    play(replicas)
    slow = assert_equal_the_twin(replicas)[3]
    assert slow.steps < 120
    assert slow.reduced > 10
    assert any("r3" in names for names in listed_in(job.store)[12:]), "it came back"


def test_two_ranks_of_each_replica_reduce_their_own_shards() -> None:
    job = job_of(26, 4, "int8", grace_s=60.0, ranks=2)
    replicas = [rank for i in range(4) for rank in start_ranks(f"r{i}", i, job)]
    play(replicas)
    assert_equal_the_twin(replicas)
    assert {f"y/0/r3{suffix}" for suffix in ("", ".1")} <= job.store.objects.keys()


def damaging(key: str) -> Rule:
    """The last byte of an object is read wrong."""

    def rule(verb: str, asked: str, request: Callable[[], Any]) -> Any:
        found = request()
        if (verb, asked) == ("get", key) and found is not None:
            return found[:-1] + bytes([found[-1] ^ 1])
        return found

    return rule


@pytest.mark.parametrize("key", ["x/4/r0", "y/4/r1"])
def test_a_damaged_part_is_an_error_of_who_reads_it(key: str) -> None:
    job = job_of(40, 1, grace_s=0.5, step_s=0.005)
    replicas = [Replica(f"r{i}", i, job) for i in range(4)]
    replicas[3].store = ScriptedStore(job.store, damaging(key))
    for one in replicas:
        one.start()
    with pytest.raises(RuntimeError, match="A thread that uses memory has ended") as raised:
        play([replicas[3]])
    assert f"The object {key} in memory is damaged: a part differs" in str(raised.value.__cause__)
    play(replicas[:3])
    assert_equal_the_twin(replicas[:3])


def test_a_message_has_parts_of_at_least_16_blocks_and_one_with_error_feedback() -> None:
    block = 256
    sizes = (10, 31 * block, 32 * block, 33 * block, 10**6, 10**9)
    assert [num_parts(size, CODECS["fp4"]) for size in sizes] == [1, 1, 2, 2, 32, 32]
    # a second rounding's error would be known to one owner only
    assert num_parts(10**6, CODECS["int2"]) == 1


def test_a_range_of_parts_is_checked_without_the_rest() -> None:
    data = sealed([b"first", b"second"])
    assert [*opened(data)] == [b"first", b"second"]
    assert opened(data[SEAL_BYTES + 5 :]) == [b"second"]
    for damaged in (data[:-1], data + b"?"):
        with pytest.raises(ValueError, match=r"a part (differs|is incomplete)"):
            opened(damaged)


def test_two_replicas_gather_messages_in_parts() -> None:
    job = job_of(26, 2, grace_s=60.0)
    replicas = [Replica(f"r{i}", i, job).start() for i in range(2)]
    play(replicas)
    assert [one.reduced for one in assert_equal_the_twin(replicas)] == [0, 0]
    assert not flights_of(job, "y")
