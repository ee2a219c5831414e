"""Ranks of a node that vote as one worker: each carries its part, and all hear everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_commfree.comm.requests import STOP, STREAM_ENDS
from lightning_commfree.lion import LionSettings
from tests.lion import training
from tests.lion.threads import in_nodes
from tests.lion.training import BUCKETS, SHAPES, Gradients, Run, Worker, play


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    training.small_buckets(monkeypatch)


def train(nodes: int, size: int, steps: int, data: Any = training.gradients, **kwargs: Any) -> Any:
    """Gradients depend on step and node: they are equal within one."""
    settings = LionSettings(node_size=size, **kwargs)
    return in_nodes(nodes, size, lambda c, node: Worker(c, settings, node).train(steps, data))


def opposed(step: int, node: int) -> Gradients:
    """Every other node votes the other way: all places tie for an even number, and no vote is 0."""
    del step
    return {name: torch.full(shape, 1.0 - 2 * (node % 2)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("vote", ["majority", "average"])
@pytest.mark.parametrize(("nodes", "size"), [(1, 2), (2, 3), (3, 2)])
def test_nodes_vote_as_so_many_workers(nodes: int, size: int, vote: str) -> None:
    twin = play(nodes, 8, vote)
    runs = train(nodes, size, 8, vote=vote, check_drift_every=1)
    assert len(runs) == nodes * size
    for rank, run in enumerate(runs):
        training.assert_same_steps(run, twin, rank)
        if rank < size:
            training.assert_same(run.momenta, twin.momenta)


@pytest.mark.parametrize("settings", [{}, {"ties": "random"}, {"vote": "average"}])
@pytest.mark.parametrize(("nodes", "size"), [(3, 2), (4, 3)])
def test_a_rank_sends_its_part_to_other_nodes(
    nodes: int, size: int, settings: dict[str, str]
) -> None:
    """A plane of N bits is padded to 64 for every rank; a rank's part is one of `size`."""
    down = 2 if nodes % 2 == 0 and not settings else 1
    down = math.ceil(math.log2(nodes + 1)) if "vote" in settings else down
    expected = 0
    for names in BUCKETS:
        numel = sum(math.prod(SHAPES[name]) for name in names)
        shard, head = 8 * math.ceil(numel / (64 * nodes * size)), 16 + 8
        gather = (nodes - 1) * (head + nodes * shard)
        expected += min((nodes - 1) * (head + shard + 8 + down * shard), gather)

    def rank(channel: Any, node: Any) -> tuple[Run, int]:
        one = Worker(channel, LionSettings(node_size=size, **settings), node)
        return one.train(3, opposed), one.voting.bytes_per_step.total()

    for run, foretold in in_nodes(nodes, size, rank):
        assert run.sent == [expected] * 3
        assert foretold == expected


def test_one_ranks_wish_to_stop_and_end_of_stream_reach_every_rank() -> None:
    """Of rank 3 of three nodes of two: only ranks 1 and 5 hear it from its channel."""

    def rank(channel: Any, node: Any) -> list[int]:
        one, said = Worker(channel, LionSettings(node_size=2), node), []
        for step in range(4):
            here = (channel.rank, node.rank) == (1, 1)
            asks = STOP * (here and step == 1) + STREAM_ENDS * (here and step == 2)
            one.voting.requests.outgoing = lambda asks=asks: asks
            one.step(training.gradients(step, channel.rank))
            said.append(one.voting.requests.take())
        one.lion.leave()
        return said

    expected = [0, STOP, STREAM_ENDS, 0]
    assert in_nodes(3, 2, rank) == [expected] * 6


def sick_node(step: int, node: int) -> Gradients:
    values = training.gradients(step, node)
    if step == 2 and node == 1:
        values["conv"].fill_(math.nan)
    return values


def test_nan_on_a_node_stops_all_and_names_its_ranks() -> None:
    def rank(channel: Any, node: Any) -> None:
        one = Worker(channel, LionSettings(node_size=2), node)
        for step in range(2):
            before = one.step(sick_node(step, channel.rank))
        with pytest.raises(RuntimeError, match="gradient of 'conv' on ranks 2 to 3 contains NaN"):
            one.step(sick_node(2, channel.rank))
        training.assert_same(training.snapshot(one.named), before)
        one.lion.leave()

    in_nodes(3, 2, rank)


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_a_node_with_nan_abstains(vote: str) -> None:
    def twin_data(step: int, node: int) -> Gradients:
        values = training.gradients(step, node)
        if step == 2 and node == 1:
            values.update(bias=None, conv=None)  # of one bucket
        return values

    twin = play(3, 5, vote, twin_data)
    for run in train(3, 2, 5, sick_node, vote=vote, nonfinite="abstain"):
        training.assert_same_steps(run, twin)
        assert run.voting["abstentions"] == 1


@pytest.mark.parametrize(
    "others",
    [
        [(0, 1)],  # one rank: its node sees it, and the ranks of its place
        [(1, 0), (1, 1)],  # a node: only the others see it
        [(0, 1), (1, 1), (2, 1)],  # a place on all nodes: only within nodes it is seen
    ],
    ids=["rank", "node", "place"],
)
@pytest.mark.parametrize("fault", ["parameter", "learning rate"])
def test_a_difference_stops_all_ranks_wherever_it_is(
    fault: str, others: list[tuple[int, int]]
) -> None:
    told = {
        "parameter": "differ before step 3, including 'bias', 'conv'",
        "learning rate": "have different learning rates, betas or weight decay",
    }[fault]

    def rank(channel: Any, node: Any) -> None:
        one = Worker(channel, LionSettings(node_size=2, check_drift_every=2), node)
        one.step(training.gradients(0, channel.rank))
        if fault == "parameter":
            if (channel.rank, node.rank) in others:
                one.named["bias"].data.view(torch.int32)[2] ^= 1
            one.step(training.gradients(1, channel.rank))  # the check is not due
        elif (channel.rank, node.rank) in others:
            one.lion.param_groups[0]["lr"] *= 0.5
        before, momenta = training.snapshot(one.named), one.momenta()
        with pytest.raises(RuntimeError, match=told):
            one.step(training.gradients(2, channel.rank))
        training.assert_same(training.snapshot(one.named), before)
        training.assert_same(one.momenta(), momenta)
        one.lion.leave()

    in_nodes(3, 2, rank)


def test_ties_are_drawn_the_same_on_all_ranks_and_independently_for_their_parts() -> None:
    """Every place is drawn, half of them by either rank of a node."""
    first, *others = train(2, 2, 3, opposed, ties="random")
    for run in others:
        training.assert_same_steps(run, first)
    moves = (first.seen[0]["head"] - training.parameters()["head"] * (1 - 0.01 * 0.3)).detach()
    signs = moves.sign().flatten()
    assert (signs != 0).all()
    # 320 coins: the mean has a standard deviation of 0.056
    assert abs(float(signs.mean())) < 0.3
    # 321 places are 64 bytes, and a rank's part 32 of them: what lies at one place of both parts;
    # were they drawn alike, it would be 3/4 (a standard deviation here is 0.03)
    assert abs(float((signs[32:] == signs[:-32]).float().mean()) - 0.5) < 0.12
    later = (first.seen[1]["head"] - first.seen[0]["head"] * (1 - 0.01 * 0.3)).sign().flatten()
    assert abs(float((later == signs).float().mean()) - 0.5) < 0.15
