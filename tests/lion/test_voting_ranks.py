"""The same on real gloo ranks: bits against the serial twin, bytes against the ledger."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion import DistributedLion, LionSettings
from tests.lion import training
from tests.lion.training import Run, Worker, assert_same, assert_same_steps, play
from tests.world import run_ranks

STEPS = 24
VOTES = ("majority", "average")


def open_all(rank: int, size: int) -> Channel:
    return Channel.open([list(range(size))], rank, Ledger())


def worker(rank: int, size: int, **settings: Any) -> Worker:
    return Worker(open_all(rank, size), LionSettings(**settings))


def train(rank: int, size: int, steps: int, data: Any, **settings: Any) -> tuple[Run, int]:
    one = worker(rank, size, **settings)
    outcome = one.train(steps, data), one.voting.bytes_per_step.total()
    one.channel.close()
    return outcome


def told_to_stop(rank: int, size: int, sick: int | None, flipped: int | None) -> str:
    """Return what a rank is told when one has NaN, or another parameters."""
    one = worker(rank, size, check_drift_every=1)
    before = one.step(training.gradients(0, rank))
    values = training.gradients(1, rank)
    if rank == sick:
        values["conv"][0, 0, 0, 0] = math.nan
    if rank == flipped:
        one.named["bias"].data.view(torch.int32)[2] ^= 1
        before = training.snapshot(one.named)
    with pytest.raises(RuntimeError) as error:
        one.step(values)
    assert_same(training.snapshot(one.named), before)
    one.lion.leave()
    one.channel.close()
    return str(error.value)


class Net(nn.Module):
    """Three layers, each a bucket; the ranks use them in other orders, and rank 1 not all."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for parameter in self.parameters():
            parameter.data.normal_(0.0, 0.4, generator=generator)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for i in ([0, 1, 2], [1, 0], [2, 1, 0])[rank % 3]:
            x = torch.tanh(self.layers[i](x))
        return x.square().sum()


def backward(rank: int, size: int, overlap: bool) -> dict[str, Tensor]:
    net, channel = Net(), open_all(rank, size)
    lion = DistributedLion(net.parameters(), lr=0.01, weight_decay=0.1)
    voting = lion.join(
        list(net.named_parameters()), View.of(channel), LionSettings(check_drift_every=1)
    )
    assert len(voting.buckets) == 3
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        lion.zero_grad()
        loss = net(torch.randn(4, 6, generator=generator), rank)
        if overlap:
            with voting.during_backward():
                loss.backward()
                assert len(voting._flights) == (0 if rank % 3 == 1 else 3)
        else:
            loss.backward()
        lion.step()
    lion.leave()
    channel.close()
    return training.snapshot(dict(net.named_parameters()))


def in_two_nodes(rank: int) -> Run:
    across = Channel.open([[0, 2], [1, 3]], rank, Ledger())
    within = Channel.open([[0, 1], [2, 3]], rank, Ledger())
    settings = LionSettings(node_size=2, check_drift_every=1)
    run = Worker(across, settings, within).train(20)
    across.close()
    within.close()
    return run


def equal_data(step: int, worker: int) -> training.Gradients:
    del worker
    return training.gradients(step, 0)


def everything(rank: int, size: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        training.small_buckets(patch)
        runs: dict[Any, Any] = {
            vote: train(rank, size, STEPS, training.gradients, vote=vote)[0] for vote in VOTES
        }
        for ties in ("zero", "random"):
            runs["equal data", ties] = train(rank, size, 20, equal_data, ties=ties)[0]
        for case in ({}, {"ties": "random"}, {"vote": "average"}):
            runs[("bytes", *case.values())] = train(rank, size, 5, training.dense_gradients, **case)
        runs["nan"] = told_to_stop(rank, size, sick=size - 1, flipped=None)
        runs["drift"] = told_to_stop(rank, size, sick=None, flipped=0)
        runs["overlap"], runs["plain"] = (backward(rank, size, b) for b in (True, False))
        runs["nodes"] = in_two_nodes(rank)
    return runs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(everything, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("vote", VOTES)
def test_every_step_equals_the_twin_bit_for_bit(ranks: list[Any], vote: str) -> None:
    """24 steps, two groups, decay, two halvings of the rate, zeros, gradients that are None."""
    twin = play(len(ranks), STEPS, vote)
    for rank, runs in enumerate(ranks):
        assert_same_steps(runs[vote], twin, rank)
    assert_same(ranks[0][vote].momenta, twin.momenta)


@pytest.mark.parametrize("ties", ["zero", "random"])
def test_equal_data_is_lion_alone(ranks: list[Any], ties: str) -> None:
    named, lion, alone = training.train_alone(20)
    momenta = {name: lion.state[p]["momentum"] for name, p in named.items()}
    for runs in ranks:
        run = runs["equal data", ties]
        assert_same_steps(run, Run(alone, {}, [], {}))
        assert_same(run.momenta, momenta)


@pytest.mark.parametrize("case", [(), ("random",), ("average",)])
def test_the_ledger_counts_what_was_foretold(ranks: list[Any], case: tuple[str, ...]) -> None:
    for runs in ranks:
        run, foretold = runs[("bytes", *case)]
        assert run.sent == [foretold] * 5
    if case == ("random",):
        for runs in ranks[1:]:
            assert_same_steps(runs["bytes", "random"][0], ranks[0]["bytes", "random"][0])


def test_all_are_told_the_same(ranks: list[Any]) -> None:
    last = len(ranks) - 1
    for runs in ranks:
        assert f"The gradient of 'conv' on rank {last} contains NaN or Inf, before" in runs["nan"]
        assert "parameters differ before step 2, including 'bias', 'conv'." in runs["drift"]


def test_votes_during_backward_change_nothing(ranks: list[Any]) -> None:
    for runs in ranks:
        assert_same(runs["overlap"], ranks[0]["plain"])
        assert_same(runs["plain"], ranks[0]["plain"])
    assert not torch.equal(ranks[0]["plain"]["layers.2.weight"], Net().layers[2].weight)


def test_two_nodes_of_two_are_two_workers(ranks: list[Any]) -> None:
    twin = play(2, 20)
    for rank, runs in enumerate(ranks):
        assert_same_steps(runs["nodes"], twin, rank)
        if rank < 2:
            assert_same(runs["nodes"].momenta, twin.momenta)
