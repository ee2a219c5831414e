"""Replicas of several ranks on a job's log, compared with a replay of each rank from the log."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch

from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.log import ABSTAINS, JobLog
from lightning_commfree.elastic.ranks import ReplicaRanks
from tests.diloco.training import Run, bits, twin
from tests.elastic.log_twin import (
    Job,
    Killed,
    LogTwin,
    assert_equal_the_twin,
    listed_in,
    play,
    start_ranks,
    wait_until,
)
from tests.elastic.memory_store import MemoryStore
from tests.elastic.thread_channel import Meeting, ThreadChannel
from tests.stores.faulty_store import FaultyStore

pytestmark = pytest.mark.usefixtures("turns")

FEW = {"sync_every": 8, "num_fragments": 3}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("changes", [{"overlap_steps": 0}, FEW | {"overlap_steps": 5}], ids=str)
def test_without_failures_it_equals_streaming_diloco(ranks: int, changes: dict[str, Any]) -> None:
    job = Job(MemoryStore(), 26, changes, grace_s=30.0, min_replicas=2, ranks=ranks)
    replicas = [rank for i in (0, 1) for rank in start_ranks(f"r{i}", i, job)]
    play(replicas)
    expected = twin(2, Run(26, changes), LogTwin(replicas[0]).names)
    for replica in replicas:
        for got, state in zip(replica.trace.local, expected[replica.data].local, strict=True):
            for name, tensor in state.items():
                assert torch.equal(bits(got[name]), bits(tensor)), (replica.name, name)
    assert_equal_the_twin(replicas)


@pytest.mark.parametrize("wire_dtype", ["fp4", "int8"])
def test_a_kill_costs_one_grace_and_a_restart_joins(wire_dtype: str) -> None:
    changes = FEW | {"wire_dtype": wire_dtype}
    job = Job(MemoryStore(), 160, changes, 0.5, step_s=0.02, min_replicas=2, ranks=2)
    store = job.store

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 8:  # flight 0 has been launched
            wait_until(lambda: "x/0/r2" in store.objects)
        if step == 60:
            wait_until(lambda: any(key.endswith("/r2-again") for key in store.list("x/")))

    def kill(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            raise Killed

    replicas = [rank for i in (0, 1) for rank in start_ranks(f"r{i}", i, job, wait)]
    killed = start_ranks("r2", 2, job, kill)
    for rank in killed:
        rank.thread.join()
    wait_until(lambda: ["r0", "r1"] in listed_in(store))
    replicas += start_ranks("r2-again", 2, job)
    play([*replicas, *killed])
    assert_equal_the_twin([*replicas, *killed])
    assert any("r2" in names for names in listed_in(store))
    assert any("r2-again" in names for names in listed_in(store))


def test_ranks_that_are_late_at_different_times_skip_the_same_steps() -> None:
    awake = threading.Event()
    job = Job(MemoryStore(), 160, FEW, grace_s=0.2, step_s=0.02, ranks=2)

    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20 + diloco.ranks.rank:
            wait_until(lambda: listed_in(job.store)[5:].count(["r0"]) >= 3)
            awake.set()

    def wait(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 60:
            awake.wait(30)

    replicas = [*start_ranks("r0", 0, job, wait), *start_ranks("r1", 1, job, sleep)]
    play(replicas)
    assert_equal_the_twin(replicas)
    assert LogTwin(replicas[-1]).replay().steps < 160


def test_by_time_all_ranks_of_a_slow_replica_skip_the_same_steps() -> None:
    def slow(diloco: ElasticDiLoCo, step: int) -> None:
        time.sleep(0.02 + 0.02 * diloco.ranks.rank)

    job = Job(MemoryStore(), 60, FEW, grace_s=5.0, step_s=0.02, by_time=True, ranks=2)
    replicas = [*start_ranks("r0", 0, job), *start_ranks("r1", 1, job, slow)]
    play(replicas)
    assert_equal_the_twin(replicas)


def test_a_job_that_died_as_a_whole_continues_from_the_log() -> None:
    def kill(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 40:
            raise Killed

    job = Job(MemoryStore(), 80, FEW, step_s=0.01, state_cycles=1, ranks=2)
    first = [rank for i in (0, 1) for rank in start_ranks(f"r{i}", i, job, kill)]
    play(first)
    second = [rank for i in (0, 1) for rank in start_ranks(f"r{i}-again", i, job)]
    play(second)
    assert_equal_the_twin([*first, *second])
    assert all(replica.final is not None for replica in second)
    late = start_ranks("late", 0, job)
    play(late)
    for rank in late:
        assert rank.final is not None
        assert all(torch.equal(rank.final[n], t) for n, t in (second[0].final or {}).items())


def test_a_sleeper_continues_from_a_state_when_messages_are_deleted() -> None:
    def sleep(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 10:
            time.sleep(3.0)

    job = Job(MemoryStore(), 200, FEW, grace_s=0.1, step_s=0.02, state_cycles=1, ranks=2)
    replicas = [*start_ranks("r0", 0, job), *start_ranks("r1", 1, job, sleep)]
    play(replicas)
    sleeper = replicas[2]
    assert [event for event in sleeper.events if event[0] == "state" and event[1] >= 0]
    assert_equal_the_twin(replicas)
    assert len(job.store.list("state/")) <= 4
    assert len(job.store.list("part/")) <= 8
    for suffix in ("r0", "r0.1", "r1.1"):
        kept = [key for key in job.store.list("x/") if key.endswith(suffix)]
        assert len(kept) < len(job.store.list("commit/")), suffix


def test_a_replica_abstains_if_one_of_its_ranks_has_nan() -> None:
    def poison(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20 and diloco.ranks.rank == 1:
            with torch.no_grad():
                diloco.fragments[0].local[-1].fill_(torch.nan)  # exchanged by rank 1

    changes = FEW | {"nonfinite": "abstain"}
    job = Job(MemoryStore(), 60, changes, min_replicas=2, step_s=0.01, ranks=2)
    replicas = [*start_ranks("r0", 0, job), *start_ranks("r1", 1, job, poison)]
    play(replicas)
    listed = listed_in(job.store)
    assert ["r0"] in listed
    assert listed[-1] == ["r0", "r1"]
    flight = listed.index(["r0"])
    kept = job.store.objects | job.store.deleted
    assert kept[f"x/{flight}/r1"] == kept[f"x/{flight}/r1.1"] == ABSTAINS
    assert_equal_the_twin(replicas[:2])


def test_a_store_that_fails_and_loses_answers_costs_no_step() -> None:
    job = Job(MemoryStore(), 60, FEW, min_replicas=2, ranks=2)
    store = FaultyStore(job.store, seed=1, refused=0.05, lost=0.05)
    faulty = Job(store, 60, FEW, grace_s=30.0, min_replicas=2, step_s=0.01, ranks=2)
    replicas = [rank for i in (0, 1) for rank in start_ranks(f"r{i}", i, faulty)]
    play(replicas)
    for replica in replicas:
        replica.job = job
    assert_equal_the_twin(replicas)


def logs_of(store: MemoryStore, name: str) -> list[JobLog]:
    """Return the logs of a replica's two ranks."""
    meetings = [Meeting(2) for _ in range(3)]
    return [
        JobLog(store, name, lambda flight: (10,), ranks=ReplicaRanks(*channels))
        for channels in ([ThreadChannel(one, rank) for one in meetings] for rank in (0, 1))
    ]


def on_all(*calls: Any) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_that_begin_at_once_begin_with_the_states_of_one() -> None:
    store = MemoryStore()
    logs = {name: logs_of(store, name) for name in ("r0", "r1")}
    on_all(
        *(
            lambda log=log, text=f"{name} {rank}": log.begin({}, text.encode)
            for name, pair in logs.items()
            for rank, log in enumerate(pair)
        )
    )
    founder = json.loads(store.objects["config"])["founder"]
    assert store.list("state/") == [f"state/{founder}"]
    assert store.list("part/") == [f"part/{founder}.{founder}.{rank}.0" for rank in (0, 1)]
    found: list[Any] = []
    on_all(*(lambda log=log: found.append(log.newest_state()) for log in logs["r1"]))
    assert sorted(found) == [(-1, f"{founder} {rank}".encode()) for rank in (0, 1)]


def test_rank_0_creates_its_message_when_the_others_exist() -> None:
    store = MemoryStore()
    first, second = logs_of(store, "r0")
    calls = [
        threading.Thread(target=log._create, args=("x/0/r0", b"0123456789"), daemon=True)
        for log in (first, second)
    ]
    calls[0].start()
    time.sleep(0.2)
    assert not store.objects
    calls[1].start()
    for call in calls:
        call.join(10.0)
    assert store.objects["x/0/r0.1"] == b"0123456789"
    assert store.objects["x/0/r0"] == b"0123456789"
