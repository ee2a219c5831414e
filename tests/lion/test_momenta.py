"""Momenta that are averaged from time to time: the same bits everywhere, and what they cost."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.exchange import View
from lightning_commfree.lion import DistributedLion, LionSettings, mean_momenta
from lightning_commfree.lion.worker import MOMENTUM_TAG, LionParam, average_momenta, momentum_bytes
from tests.lion import training
from tests.lion.threads import in_nodes, in_threads
from tests.lion.training import Worker, play

EVERY = 3


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    training.small_buckets(monkeypatch)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_runs_with_and_without_sync_equal_their_twins(workers: int) -> None:
    """Seven steps, of which the third and the sixth end with a sync."""
    for every in (EVERY, 0):
        settings = LionSettings(momentum_sync_every=every)
        runs = in_threads(workers, lambda channel, s=settings: Worker(channel, s).train(7))
        twin = play(workers, 7, sync_every=every)
        for rank, run in enumerate(runs):
            training.assert_same_steps(run, twin, (every, rank))
        training.assert_same(runs[0].momenta, twin.momenta)
    if workers > 2:
        apart = (
            play(workers, 7).seen[-1]["head"] - play(workers, 7, sync_every=EVERY).seen[-1]["head"]
        )
        assert apart.abs().max() > 0, "the sync must change a vote, or the comparison is weak"


def member(momentum: Tensor) -> LionParam:
    return LionParam(nn.Parameter(torch.zeros(momentum.shape)), {"momentum": momentum}, {})


def momentum_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(10 * numel + rank)
    return torch.randn(numel, generator=generator).to(dtype)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("numels", [[1], [3, 0, 4], [30], [31, 29]])
def test_the_mean_is_added_up_in_the_order_of_the_workers(workers: int, numels: list[int]) -> None:
    """Lengths that do and do not divide; float64 beside float32, which must not round it."""
    dtypes = [torch.float32, torch.float64, torch.float32][: len(numels)]

    def worker(channel: Any) -> tuple[list[Tensor], int, int]:
        pairs = zip(numels, dtypes, strict=True)
        members = [member(momentum_of(channel.rank, *pair)) for pair in pairs]
        average_momenta(members, View.of(channel))
        momenta = [m.state["momentum"] for m in members]
        return momenta, channel.sent[MOMENTUM_TAG], momentum_bytes(members, View.of(channel))

    width = 8 if torch.float64 in dtypes else 4
    sent = 2 * (workers - 1) * math.ceil(sum(numels) / workers) * width
    for momenta, counted, foretold in in_threads(workers, worker):
        assert counted == foretold == sent
        for numel, dtype, got in zip(numels, dtypes, momenta, strict=True):
            total = momentum_of(0, numel, dtype)
            for rank in range(1, workers):
                # exact in float64: what is rounded to float32 at the end was rounded once
                total = total.to(torch.float64 if width == 8 else dtype)
                total = total + momentum_of(rank, numel, dtype)
            assert got.dtype == dtype
            assert torch.equal(got, (total / workers).to(dtype))


def test_ranks_of_a_node_share_the_work_and_the_momenta() -> None:
    """Each sends its half to the other nodes."""

    def rank(channel: Any, node: Any) -> tuple[Tensor, int, int]:
        members = [member(momentum_of(channel.rank, 31))]
        average_momenta(members, View.of(channel), node)
        return (
            members[0].state["momentum"],
            channel.sent[MOMENTUM_TAG],
            momentum_bytes(members, View.of(channel), node),
        )

    total = momentum_of(0, 31)
    for worker in (1, 2):
        total = total + momentum_of(worker, 31)
    for momentum, counted, foretold in in_nodes(3, 2, rank):
        assert torch.equal(momentum, total / 3)
        assert counted == foretold == 2 * 2 * math.ceil(31 / 6) * 4


@pytest.mark.parametrize("every", [1, EVERY])
def test_a_cycle_is_what_is_sent_from_sync_to_sync(every: int) -> None:
    def worker(channel: Any) -> tuple[int, list[int], tuple[int, int]]:
        one = Worker(channel, LionSettings(momentum_sync_every=every))
        sent, steps = one.voting.cycle()
        assert sent[MOMENTUM_TAG] == sync
        foretold = sent.total(), steps
        run = one.train(2 * every, training.dense_gradients)
        return one.voting.bytes_per_step, run.sent, foretold

    sync = sum(
        2 * 3 * 4 * math.ceil(sum(math.prod(training.SHAPES[n]) for n in names) / 4)
        for names in training.BUCKETS
    )
    for step_bytes, sent, foretold in in_threads(4, worker):
        one_cycle = [step_bytes] * (every - 1) + [step_bytes + sync]
        assert sent == one_cycle * 2
        assert foretold == (sum(one_cycle), every)


def test_the_mean_of_saved_states() -> None:
    """For another number of workers; everything but the momentum is the first one's."""
    states = []
    for seed in range(3):
        parameters = [nn.Parameter(momentum_of(seed, n).to(torch.bfloat16)) for n in (5, 7)]
        lion = DistributedLion(parameters, lr=0.1 * (seed + 1))
        for parameter in parameters:
            parameter.grad = momentum_of(seed + 9, parameter.numel()).to(torch.bfloat16)
        lion.step()
        states.append(lion.state_dict())
    before = copy.deepcopy(states)
    mean = mean_momenta(states)
    assert mean["param_groups"] == before[0]["param_groups"]
    for index, state in mean["state"].items():
        momenta = [other["state"][index]["momentum"] for other in before]
        assert torch.equal(state["momentum"], (momenta[0] + momenta[1] + momenta[2]) / 3)
        assert torch.equal(state["master"], before[0]["state"][index]["master"])
    for state, was in zip(states, before, strict=True):
        for index, kept in was["state"].items():
            training.assert_same(state["state"][index], kept, "the states are left alone")
