"""Whole steps of every algorithm have no data race on a CUDA device; each mechanism is needed.

`tests.race_walk` says what is found, and what is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from lightning_commfree.comm.background import Staging
from tests.cuda_walk import CPU
from tests.diloco.test_cuda_walk_diloco import Training
from tests.domino.models import Case
from tests.domino.test_cuda import CASES, walking
from tests.elastic.test_cuda_walk_elastic import BEHIND, ElasticTraining
from tests.lion.test_cuda_walk_lion import Worker
from tests.race_walk import Mechanism, Races, RaceWalk, StreamChannel

WAIT_STREAM, WAIT_EVENT, RECORD_STREAM, HOST_WAITS, NCCL_WAITS = Mechanism


def stage(walk: RaceWalk, patch: pytest.MonkeyPatch) -> None:
    """A payload is encoded beside training, which reuses the memory of its values."""
    del patch
    with walk:
        values = torch.ones(1000, device=walk.device) * 2
        wait = Staging().stage(partial(torch.mul, values, 3), [values])
        del values
        torch.full((1000,), 5.0, device=walk.device)
        wait().sum()


def upload(walk: RaceWalk, patch: pytest.MonkeyPatch) -> None:
    """Messages are decoded beside training, which then uses the result."""
    del patch
    with walk:
        finish = Staging().upload(torch.ones(1000), walk.device, lambda sent: (sent * 3,))
        (decoded,) = finish()
        decoded.sum()
        del finish, decoded


def diloco(
    size: int, walk: RaceWalk, patch: pytest.MonkeyPatch, ranks: int = 1, **settings: Any
) -> None:
    within = StreamChannel(walk, ranks) if ranks > 1 else None
    training = Training(patch, size, CPU, walk=walk, within=within)
    training.run(**{"wire_dtype": "fp4", "replica_size": ranks, **settings})


def elastic(size: int, walk: RaceWalk, patch: pytest.MonkeyPatch, **of_log: Any) -> None:
    """A state is written each cycle, and copied while training goes on."""
    ElasticTraining(patch, size, walk=walk, **of_log).run()


def lion(walk: RaceWalk, patch: pytest.MonkeyPatch, **settings: Any) -> None:
    Worker(patch, 3, walk=walk).run(**settings)


def domino(case: Case, walk: RaceWalk, patch: pytest.MonkeyPatch) -> None:
    """Two steps: the second one meets what the first one left."""
    del patch
    with walking(case, walk, partial(StreamChannel, walk)) as step:
        step.take()
        step.optimizer.zero_grad()
        step.take()


Run = Callable[[RaceWalk, pytest.MonkeyPatch], None]
STAGED, VOTED = (WAIT_STREAM, RECORD_STREAM, HOST_WAITS), (HOST_WAITS, WAIT_EVENT, RECORD_STREAM)
LANDED, WITHIN = (*STAGED, WAIT_EVENT), (*STAGED, WAIT_EVENT, NCCL_WAITS)
# What runs, and the mechanisms that it cannot do without.
RUNS: dict[str, tuple[Run, tuple[Mechanism, ...]]] = {
    "staging": (stage, STAGED),
    "upload": (upload, (WAIT_EVENT, RECORD_STREAM)),
    "diloco": (partial(diloco, 2), LANDED),
    "diloco, int2, 3 replicas": (partial(diloco, 3, wire_dtype="int2"), LANDED),
    "diloco, outer_device": (partial(diloco, 2, outer_device="cpu"), STAGED),
    "diloco, 2 ranks": (partial(diloco, 2, ranks=2), WITHIN),
    "diloco, 2 ranks, 3 replicas": (partial(diloco, 3, ranks=2), WITHIN),
    "diloco, 2 ranks, outer_device": (
        partial(diloco, 2, ranks=2, outer_device="cpu"),
        (*STAGED, NCCL_WAITS),
    ),
    "elastic": (partial(elastic, 2), LANDED),
    "elastic, two phases": (partial(elastic, 9), LANDED),
    "elastic, continues from a state": (partial(elastic, 2, **BEHIND), LANDED),
    "lion": (lion, VOTED),
    "lion, average": (partial(lion, vote="average"), VOTED),
    "lion, after backward": (partial(lion, overlap=False), VOTED),
    **{f"domino, {case}": (partial(domino, case), (NCCL_WAITS,)) for case in CASES},
}
PLANTED = [(name, mechanism) for name, (_, needed) in RUNS.items() for mechanism in needed]


@cache
def races_of(name: str) -> dict[Mechanism | None, Races]:
    """Walk a run, once for all tests; return its races as it is and without each mechanism."""
    run, needed = RUNS[name]
    walk = RaceWalk(needed)
    with pytest.MonkeyPatch.context() as patch:
        run(walk, patch)
    return walk.races


@pytest.mark.parametrize("name", RUNS)
def test_there_is_no_race(name: str) -> None:
    assert races_of(name)[None].found == []


@pytest.mark.parametrize(("name", "mechanism"), PLANTED, ids=str)
def test_without_a_mechanism_there_are_races(name: str, mechanism: Mechanism) -> None:
    assert races_of(name)[mechanism].found
