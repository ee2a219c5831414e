"""The collectives of a step, from the ledger, and their overlap, from the trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_commfree.domino.layers import BACKWARD_TAG, FORWARD_TAG
from lightning_commfree.domino.loss import LOSS_TAG
from lightning_commfree.domino.schedule import EMBEDDING
from tests.domino.models import LAYERS, Case, batch_for, make_for, step
from tests.domino.ranks import divide, with_channel
from tests.world import run_ranks

Event = tuple[str, str, int]  # what, sublayer, micro-batch
Found = dict[Case, list[tuple[list[Event], Counter[str]]]]  # by rank
SUBLAYERS = [f"layer {i} {name}" for i in range(LAYERS) for name in ("attention", "mlp")]
CASES = [
    Case(kind, 3, split, parts, checkpoint)
    for kind, checkpoint in (("gpt2", True), ("llama", False))
    for split, parts in (
        *(("batch", 2), ("batch", 3), ("token", 2)),
        *(("weight", 3), ("hybrid", 2), ("none", 2)),
    )
]


def traced(channel: Any, cases: list[Case]) -> list[tuple[list[Event], Counter[str]]]:
    found = []
    for case in cases:
        model = make_for(case)
        parallel = divide(model, channel, case)
        events: list[Event] = []
        parallel.trace = lambda *event, events=events: events.append(event)
        channel.ledger.collectives_by_tag.clear()
        step(model, case, batch_for(case))
        found.append((events, Counter(channel.ledger.collectives_by_tag)))
    return found


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """Trace and counts of each rank, by case."""
    cases = [*CASES, *(replace(case, loss="gathered") for case in CASES)]
    by_rank = run_ranks(with_channel, 2, tmp_path_factory.mktemp("ranks"), traced, (cases,))
    return {case: [results[i] for results in by_rank] for i, case in enumerate(cases)}


def micro_batches(case: Case) -> int:
    return case.parts if case.split in ("batch", "token", "hybrid") else 1


def idle_flights(events: list[Event], direction: str) -> list[tuple[str, int]]:
    """All-reduces that overlap with no body of another micro-batch."""
    idle = []
    for start, (what, sublayer, i) in enumerate(events):
        if what == f"launch {direction}":
            stop = events.index((f"land {direction}", sublayer, i), start)
            meanwhile = events[start + 1 : stop]
            if not any(w == f"body {direction}" and other != i for w, _, other in meanwhile):
                idle.append((sublayer, i))
    return idle


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_sums_each_way_per_layer_and_micro_batch(found: Found, case: Case) -> None:
    """And none twice under activation checkpointing.

    Besides: the embedding's sum (for Llama one a micro-batch), that of the head's dx, and one for
    the loss (each rank's largest logit, sum of exponentials and score of the target). Of a row
    linear under `weight` each slice is a sum; its dx is one.
    """
    backward = 2 * LAYERS * micro_batches(case)
    forward = backward * (case.parts if case.split in ("weight", "hybrid") else 1)
    forward += 1 if case.kind == "gpt2" else micro_batches(case)
    for _, counts in found[case]:
        assert counts == {FORWARD_TAG: forward, BACKWARD_TAG: backward + 1, LOSS_TAG: 1}
    for _, counts in found[replace(case, loss="gathered")]:
        gathered = 1  # the logits
        assert counts == {FORWARD_TAG: forward + gathered, BACKWARD_TAG: backward + 1}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.split in ("batch", "token")], ids=str
)
def test_every_all_reduce_overlaps_with_another_micro_batch(found: Found, case: Case) -> None:
    """Except the last one of each direction, after which nothing is computed, and that of the
    first micro-batch's embedding, before which nothing has started.
    """
    first = [] if case.kind == "gpt2" else [(EMBEDDING, 0)]
    for events, _ in found[case]:
        assert idle_flights(events, "backward") == [(SUBLAYERS[0], 0)]
        assert idle_flights(events, "forward") == [*first, (SUBLAYERS[-1], case.parts - 1)]


def test_without_a_split_nothing_overlaps(
    found: Found,
) -> None:
    """The test above can fail. (Gradients of weights do: `test_weight_gradients`.)"""
    for events, _ in found[Case("gpt2", 3, "none", 2, checkpoint=True)]:
        assert idle_flights(events, "backward") == [
            (sublayer, 0) for sublayer in reversed(SUBLAYERS)
        ]
        assert idle_flights(events, "forward") == [(sublayer, 0) for sublayer in SUBLAYERS]
