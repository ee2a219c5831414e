"""`sync_every="auto"` of elastic replicas: all of them change H and tau at the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.diloco.training import Run, bits, twin
from tests.elastic.log_twin import (
    Job,
    Killed,
    Replica,
    assert_equal_the_twin,
    listed_in,
    play,
    start_ranks,
)
from tests.elastic.memory_store import MemoryStore
from tests.elastic.turns import Turns
from tests.stores.faulty_store import FaultyStore

AUTO: dict[str, Any] = {"sync_every": "auto", "num_fragments": 3, "overlap_steps": 2}


def test_changes_without_failures_equal_streaming_diloco(turns: Turns) -> None:
    paces = {20: (20, 5), 60: (30, 2), 93: (10, 7)}  # up, up with a smaller tau, and down
    job = Job(MemoryStore(), 120, AUTO, 30.0, 0.01, min_replicas=2, ranks=2, paces=paces)
    replicas = [rank for i in (0, 1) for rank in start_ranks(f"r{i}", i, job)]
    play(replicas)
    twins = assert_equal_the_twin(replicas)
    expected = twin(2, Run(120, AUTO, paces=paces), twins[0].names)
    for replica in replicas:
        for got, state in zip(replica.trace.local, expected[replica.data].local, strict=True):
            for name, tensor in state.items():
                assert torch.equal(bits(got[name]), bits(tensor)), (replica.name, name)
    assert [one[0] for one in twins[0].paces] == [0, *paces]


@pytest.mark.parametrize("delays_s", [(0.06, 0.06), (0.001, 0.06)], ids=str)
def test_the_slowest_link_counts_and_a_joiner_knows_the_pace(
    turns: Turns, delays_s: tuple[float, float]
) -> None:
    job = Job(MemoryStore(), 300, AUTO, grace_s=1.0, step_s=0.02, min_replicas=2, state_cycles=2)

    def dies(diloco: Any, step: int) -> None:
        if step == 190:
            raise Killed

    replicas = [
        Replica(f"r{i}", i, job, act, store=FaultyStore(job.store, delay_s=delay_s)).start()
        for i, (delay_s, act) in enumerate(zip(delays_s, (lambda *_: None, dies), strict=True))
    ]
    replicas[1].thread.join()
    replicas.append(Replica("r2", 2, job, store=FaultyStore(job.store, delay_s=0.06)).start())
    play(replicas, 600.0)
    paces = assert_equal_the_twin(replicas)[0].paces
    assert any("r2" in names for names in listed_in(job.store))
    (_, sync_every, overlap_steps), *_, last = paces
    assert (sync_every, overlap_steps) == (10, 5)
    assert last[1] > 10, "three requests of 3 steps each, for each of 3 fragments"
    assert last[2] > 5


def test_fast_links_keep_the_smallest_h(turns: Turns) -> None:
    job = Job(MemoryStore(), 150, AUTO, grace_s=1.0, step_s=0.02, min_replicas=2)
    replicas = [Replica(f"r{i}", i, job).start() for i in (0, 1)]
    play(replicas, 600.0)
    assert [twin.paces for twin in assert_equal_the_twin(replicas)] == [[(0, 10, 5)]] * 2
