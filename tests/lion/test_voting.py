"""A worker among others, in threads: what a step changes, what it sends, what it says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.requests import STOP, STREAM_ENDS
from lightning_commfree.lion import DistributedLion, LionSettings
from tests.lion import training
from tests.lion.serial import SerialLion, sign
from tests.lion.threads import in_threads
from tests.lion.training import BUCKETS, NUMEL, Run, Worker, play


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    training.small_buckets(monkeypatch)


def train(workers: int, steps: int, data: Any = training.gradients, **settings: Any) -> list[Run]:
    return in_threads(
        workers, lambda channel: Worker(channel, LionSettings(**settings)).train(steps, data)
    )


@pytest.mark.parametrize("vote", ["majority", "average"])
@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_every_step_equals_the_twin_bit_for_bit(workers: int, vote: str) -> None:
    """With a comparison of the parameters at every step, which must find nothing."""
    twin = play(workers, 12, vote)
    runs = train(workers, 12, vote=vote, check_drift_every=1)
    for rank, run in enumerate(runs):
        training.assert_same_steps(run, twin, rank)
    training.assert_same(runs[0].momenta, twin.momenta)
    if workers > 1:
        apart = runs[1].momenta["head"] - runs[0].momenta["head"]
        assert apart.abs().max() > 0.1, "momenta are private"


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_parameters_of_several_dtypes_share_a_bucket(vote: str) -> None:
    """float64 steps in float64, bfloat16 by its fp32 master; the twin holds what is stepped."""
    dtypes = [torch.bfloat16, torch.float64, torch.float32]

    def gradient(step: int, worker: int, i: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * worker + i)
        return torch.randn(10, generator=generator).to(dtypes[i])

    def worker(channel: Any) -> list[Tensor]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, 10).to(dtype)) for dtype in dtypes]
        lion = DistributedLion(parameters, lr=0.01, weight_decay=0.1)
        named = list(zip("abc", parameters, strict=True))
        voting = lion.join(named, View.of(channel), LionSettings(vote=vote, check_drift_every=1))
        assert len(voting.buckets) == 1
        for step in range(10):
            for i, parameter in enumerate(parameters):
                parameter.grad = gradient(step, channel.rank, i)
            lion.step()
        lion.leave()
        return [p.detach() for p in parameters]

    exact = [torch.float32, torch.float64, torch.float32]
    start = [torch.linspace(-1, 1, 10).to(d).to(e) for d, e in zip(dtypes, exact, strict=True)]
    group = {"params": start, "lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    twin = SerialLion([group], 3, vote)
    for step in range(10):
        twin.step(
            [{p: gradient(step, w, i).to(p.dtype) for i, p in enumerate(start)} for w in range(3)]
        )
    for stepped in in_threads(3, worker):
        for i, parameter in enumerate(stepped):
            assert torch.equal(parameter, start[i].to(dtypes[i]))


# Bytes: N parameters in T tensors a bucket, n workers; a plane is N bits padded to 64 n


def bucket_bytes(
    n: int, numel: int, tensors: int, down: int, zeros: int = 0, wider: int = 0
) -> int:
    """What the cheaper way sends: by shards `down` planes come down.

    It was chosen before anybody knew of `zeros`, whose places (4 bytes each) or whose plane goes
    up, and of `wider` planes more that come down.
    """
    shard, head = math.ceil(numel / (64 * n)) * 8, 16 + math.ceil(tensors / 8) * 8
    shards = (n - 1) * (head + shard + 8 + down * shard)
    gather = (n - 1) * (head + n * shard)
    if shards < gather:
        return shards + (n - 1) * (min(4 * zeros, shard) + wider * shard)
    return gather + (n - 1) * min(4 * zeros, n * shard)


def planes_down(n: int, settings: dict[str, str]) -> int:
    if settings.get("vote") == "average":
        return math.ceil(math.log2(n + 1))
    return 2 if n % 2 == 0 and "ties" not in settings else 1


def sizes() -> Iterator[tuple[int, int]]:
    shapes = training.SHAPES
    for names in BUCKETS:
        yield sum(math.prod(shapes[name]) for name in names), len(names)


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("settings", [{}, {"ties": "random"}, {"vote": "average"}])
def test_bytes_of_a_step_are_foretold(n: int, settings: dict[str, str]) -> None:
    """Without zeros, all ties being there that can be, and they are: 105 places tie somewhere."""

    def worker(channel: Any) -> tuple[Run, int]:
        one = Worker(channel, LionSettings(**settings))
        return one.train(4, training.dense_gradients), one.voting.bytes_per_step.total()

    down = planes_down(n, settings)
    expected = sum(bucket_bytes(n, numel, tensors, down) for numel, tensors in sizes())
    for run, foretold in in_threads(n, worker):
        assert run.sent == [expected] * 4
        assert foretold == expected


@pytest.mark.parametrize("zeros", [1, 3, 113])
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("vote", ["majority", "average"])
def test_zeros_cost_their_own_bucket_their_places_or_a_plane(n: int, vote: str, zeros: int) -> None:
    """The bucket in the middle, at the first step, where a zero gradient is a zero direction."""

    def some_zeros(step: int, worker: int) -> training.Gradients:
        values = training.dense_gradients(step, worker)
        if step == 0 and worker == n - 1:
            values["bias"][:zeros] = 0.0
            values["conv"] *= 0.0 if zeros == 113 else 1.0
        return values

    votes = [
        torch.cat([sign(some_zeros(0, w)[name]).flatten() for name in BUCKETS[1]]) for w in range(n)
    ]
    ties = bool((sum(votes) == 0).any())  # of an odd number with a zero, too; not of 7 voters of 8
    down = planes_down(n, {"vote": vote})
    levels = math.ceil(math.log2(2 * n + 1))
    wider = (levels if vote == "average" else 1 + ties) - down
    dense = [bucket_bytes(n, numel, tensors, down) for numel, tensors in sizes()]
    numel, tensors = list(sizes())[1]
    changed = sum(dense) - dense[1] + bucket_bytes(n, numel, tensors, down, zeros, wider)
    for run in train(n, 3, some_zeros, vote=vote):
        assert run.sent == [changed, sum(dense), sum(dense)]


def test_bits_per_parameter_are_those_of_the_ledger() -> None:
    """The thread channel counts by itself; here its counts are put where a `Channel` has them."""

    def worker(channel: Any) -> tuple[dict[str, float], dict[str, int]]:
        channel.ledger.bytes_by_tag = channel.sent
        one = Worker(channel, LionSettings())
        for step in range(5):
            one.step(training.dense_gradients(step, channel.rank))
        whole, before = one.voting.bits_per_parameter(), dict(channel.sent)
        one.voting.load_state_dict({"step": 90, "abstentions": 0})
        assert one.voting.bits_per_parameter() == {"bits_up": 0.0, "bits_down": 0.0}
        one.step(training.dense_gradients(5, channel.rank))
        later = one.voting.bits_per_parameter()
        one.lion.leave()
        last = {tag: channel.sent[tag] - before[tag] for tag in before}
        assert later["bits_up"] == 8 * last["vote_up"] / NUMEL
        assert later["bits_down"] == 8 * last["vote_down"] / NUMEL
        return whole, before

    for whole, sent in in_threads(8, worker):
        assert whole["bits_up"] == 8 * sent["vote_up"] / NUMEL / 5
        assert whole["bits_down"] == 8 * sent["vote_down"] / NUMEL / 5 > 0


# What the log says


@pytest.mark.parametrize("vote", ["majority", "average"])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_shares_of_ties_zeros_and_agreement(workers: int, vote: str) -> None:
    """First step: the directions are the gradients, so all can be counted by hand."""
    votes = []
    for worker in range(workers):
        values = training.gradients(7, worker)
        flat = [
            torch.zeros(shape) if values[name] is None else values[name]
            for name, shape in training.SHAPES.items()
        ]
        votes.append(torch.cat([sign(value).reshape(-1) for value in flat]))
    total = sum(votes)

    def worker_shares(channel: Any) -> dict[str, float]:
        one = Worker(channel, LionSettings(vote=vote))
        assert one.voting.shares() == {"ties": 1, "zeros": 1, "agreement": 0}
        one.step(training.gradients(7, channel.rank))
        shares = one.voting.shares()
        one.lion.leave()
        return shares

    for mine, shares in zip(votes, in_threads(workers, worker_shares), strict=True):
        assert shares["ties"] == pytest.approx(float((total == 0).float().mean()))
        assert shares["zeros"] == pytest.approx(float((mine == 0).float().mean()))
        alike = (sign(total) == mine)[mine != 0].float().mean()
        assert shares["agreement"] == pytest.approx(float(alike))


def test_all_learn_in_the_vote_itself_of_a_wish_to_stop_and_of_a_streams_end() -> None:
    def worker(channel: Any) -> list[int]:
        one, said = Worker(channel, LionSettings()), []
        for step, ending in enumerate(([], [1], [0, 1, 2], [])):
            now, ends = step == 1 and channel.rank == 2, channel.rank in ending
            asks = STOP * now + STREAM_ENDS * ends
            one.voting.requests.outgoing = lambda asks=asks: asks
            one.step(training.gradients(step, channel.rank))
            said.append(one.voting.requests.take())
        one.lion.leave()
        return said

    expected = [0, STOP | STREAM_ENDS, STREAM_ENDS, 0]
    assert in_threads(3, worker) == [expected] * 3


# Ties that are drawn


def disagree(steps: int, first: int = 0) -> list[list[Tensor]]:
    """Let half of the workers vote + and half - on everything; return Delta by worker and step.

    The first 100 parameters have no gradient other than 0 anywhere.
    """

    def worker(channel: Any) -> list[Tensor]:
        parameters = [nn.Parameter(torch.zeros(4000)) for _ in range(2)]
        lion = DistributedLion(parameters, lr=1.0)
        named = list(zip("ab", parameters, strict=True))
        voting = lion.join(named, View.of(channel), LionSettings(ties="random"))
        voting.load_state_dict({"step": first, "abstentions": 0})
        deltas = []
        for _ in range(steps):
            for parameter in parameters:
                parameter.data.zero_()
                parameter.grad = torch.full((4000,), 1.0 if channel.rank % 2 else -1.0)
                parameter.grad[:100] = 0.0
            lion.step()
            deltas.append(-torch.stack([p.detach().clone() for p in parameters]))
        lion.leave()
        return deltas

    return in_threads(4, worker)


def test_a_tie_is_drawn_once_for_all_workers_and_again_at_every_step() -> None:
    first, *others = disagree(steps=3)
    for theirs in others:
        assert all(map(torch.equal, first, theirs))
    for mine in first:
        assert (mine[:, :100] == 0).all(), "nobody votes: it does not move"
        assert (mine[:, 100:].abs() == 1).all()
        # 7800 fair coins: their mean has a standard deviation of 0.011
        assert abs(float(mine[:, 100:].mean())) < 0.06
    # 3900 pairs of coins: the share of equal ones has a standard deviation of 0.008
    pairs = [*pairwise(first), *((mine[:1], mine[1:]) for mine in first)]
    # 4000 places are 512 bytes, 128 a shard: what lies at one place of two neighbouring shards
    pairs += [(mine[:, 100:-128], mine[:, 228:]) for mine in first]
    for a, b in pairs:
        alike = float((a == b)[a != 0].float().mean())
        assert abs(alike - 0.5) < 0.05, "steps, buckets and shards are drawn for themselves"


def test_a_resumed_run_draws_as_the_uninterrupted_one() -> None:
    whole, _, _, _ = disagree(steps=4)
    again, _, _, _ = disagree(steps=2, first=2)
    assert all(map(torch.equal, whole[2:], again))
    assert not torch.equal(whole[0], again[0])
