"""Every worker's result against the formulas, whatever is voted and however it travels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.comm.requests import STOP
from lightning_commfree.lion.ballot import DOWN_TAG, pack_digests
from lightning_commfree.lion.vote import Majority
from tests.lion.ballots import RULES, Outcome, formula, play

WAYS = ["gather", "shards"]
VOTES = ["majority", "average"]
SICK = [math.nan, math.inf, -math.inf]

Gradients = list[list[Tensor | None]]


def assert_all_are(outcomes: list[Outcome], expected: Tensor) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.delta is not None, f"worker {rank} was refused"
        same = outcome.delta.view(torch.int32) == expected.view(torch.int32)  # -0.0 is not 0.0
        assert same.all(), f"worker {rank} at {(~same).nonzero().flatten().tolist()[:5]}"


def boundary_numels(workers: int) -> list[int]:
    """Lengths at which a byte, a word, a shard or all shards are full, and their neighbours."""
    full = [64 * workers, 128 * workers, 512 * workers]
    return [1, 7, 8, 9, 63, 64, 65, 257, *(n + d for n in full for d in (-1, 0, 1))]


@st.composite
def elections(draw: st.DrawFn) -> tuple[list[int], Gradients]:
    """Sizes of parameters, and gradients by worker and parameter."""
    workers = draw(st.sampled_from([*range(1, 10), 16]))
    numel = draw(st.sampled_from(boundary_numels(workers)))
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=2)))
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, numel])]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # of each value so many: without zeros, ties alone; many zeros, also sums that are 0 by them
    weights = torch.tensor(draw(st.sampled_from([(3, 3, 0, 0), (6, 6, 1, 1), (1, 1, 2, 1)])))
    values = torch.tensor([0.5, -2.0, 0.0, -0.0])
    sick = draw(st.sets(st.integers(0, workers - 1), max_size=2))
    gradients: Gradients = []
    for worker in range(workers):
        drawn = torch.multinomial(weights.float(), numel, True, generator=generator)
        mine: list[Tensor | None] = list(values[drawn].split(sizes))
        if worker in sick and numel:
            full = [i for i, size in enumerate(sizes) if size]
            mine[full[-1]][-1] = SICK[worker % 3]
        elif draw(st.integers(0, 5)) == 0:
            mine[draw(st.integers(0, len(sizes) - 1))] = None
        gradients.append(mine)
    return sizes, gradients


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("way", WAYS)
@given(election=elections())
@settings(deadline=None, max_examples=30)
def test_a_result_is_the_formula_bit_for_bit(
    way: str, vote: str, election: tuple[list[int], Gradients]
) -> None:
    sizes, gradients = election
    outcomes = play(way, RULES[vote](), sizes, gradients)
    assert_all_are(outcomes, formula(vote, gradients, sizes))
    assert all(outcome.summary == outcomes[0].summary for outcome in outcomes)


def all_ballots(workers: int, values: Sequence[float]) -> Gradients:
    """A parameter for every ballot that workers can cast together."""
    ballots = torch.tensor(list(itertools.product(values, repeat=workers)))
    return [[column.clone()] for column in ballots.T]


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("workers", "values"),
    [(w, (1.0, -1.0)) for w in range(2, 6)] + [(w, (1.0, -1.0, 0.0)) for w in range(1, 5)],
)
def test_all_ballots_of_few_workers(
    way: str, vote: str, workers: int, values: Sequence[float]
) -> None:
    gradients = all_ballots(workers, values)
    sizes = [len(values) ** workers]
    outcomes = play(way, RULES[vote](), sizes, gradients)
    by_hand = sum(mine[0] for mine in gradients)
    by_hand = by_hand / workers if vote == "average" else torch.sign(by_hand)
    assert_all_are(outcomes, by_hand)
    assert_all_are(outcomes, formula(vote, gradients, sizes))


# Who abstains, who wants to stop, who has drifted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sick", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_a_worker_with_nan_is_left_out_and_named(way: str, sick: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    gradients: Gradients = [[torch.randn(70), torch.randn(9)] for _ in range(3)]
    for worker in sick:
        gradients[worker][1][4] = SICK[worker]
    for vote in VOTES:
        outcomes = play(way, RULES[vote](), [70, 9], gradients)
        assert_all_are(outcomes, formula(vote, gradients, [70, 9]))
        for outcome in outcomes:
            assert outcome.summary.abstaining == sick
            assert outcome.summary.faults == tuple((worker, 1) for worker in sick)
            assert not outcome.summary.zeros, "the header says it: no second plane is needed"


@pytest.mark.parametrize("way", WAYS)
def test_faults_are_refused_on_all_workers_after_one_message(way: str) -> None:
    gradients: Gradients = [[torch.ones(70), torch.ones(9)] for _ in range(3)]
    gradients[1][0][3] = math.nan
    for outcome in play(way, Majority(), [70, 9], gradients, refuse_faults=True):
        assert outcome.delta is None
        assert outcome.summary.faults == ((1, 0),)
        assert DOWN_TAG not in outcome.sent


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("hyperparameters", "parameters", "expected"),
    [
        ((3, 3, 3), (-1, -1, -1), (False, False)),
        ((3, 3, 3), (-1, -1, -2), (True, False)),
        ((3, 2**32 - 1, 3), (-1, -1, -1), (False, True)),
        ((3, 4, 3), (0, 2**40 + 1, 0), (True, True)),
    ],
)
def test_hyperparameters_and_parameters_are_told_apart(
    way: str,
    hyperparameters: tuple[int, ...],
    parameters: tuple[int, ...],
    expected: tuple[bool, bool],
) -> None:
    digests = [
        int(pack_digests(tuned, torch.tensor(drifted)))
        for tuned, drifted in zip(hyperparameters, parameters, strict=True)
    ]
    gradients: Gradients = [[torch.ones(70)] for _ in range(3)]
    for outcome in play(way, Majority(), [70], gradients, digests=digests):
        assert (
            outcome.summary.parameters_differ,
            outcome.summary.hyperparameters_differ,
        ) == expected
        assert (outcome.delta is None) == any(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stops", [(), (1,), (0, 2)])
def test_the_wish_to_stop_reaches_all(way: str, stops: tuple[int, ...]) -> None:
    gradients: Gradients = [[torch.ones(70)] for _ in range(3)]
    for outcome in play(way, Majority(), [70], gradients, stops=stops):
        assert outcome.summary.requests == STOP * bool(stops)
        assert_all_are([outcome], torch.ones(70))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_with_a_gradient_are_known_to_all(way: str) -> None:
    one = torch.ones(5)
    gradients: Gradients = [[one, None, None], [None, None, one], [one, None, -one]]
    for outcome in play(way, Majority(), [5, 5, 5], gradients):
        assert outcome.summary.with_gradient == (True, False, True)
        assert_all_are([outcome], torch.tensor([1.0, 0.0, 0.0]).repeat_interleave(5))


# What travels. N parameters in P tensors, n workers; a plane is N bits padded to 64 n
