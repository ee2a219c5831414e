"""The two rules on packed planes, and what a packed Delta reads as, against counting one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.lion.vote import Average, CountedShard, Majority, PackedDelta
from tests.planes import pack_bits

NUMEL = 128  # no padding but where a test leaves some


def words(flags: Tensor) -> Tensor:
    return pack_bits(flags).view(torch.int64)


def planes(votes_WN: Tensor) -> tuple[Tensor, Tensor]:
    """Pack votes of -1, 0 and 1 into c > 0 and c != 0, the padding 0."""
    return (
        torch.stack([words(row > 0) for row in votes_WN]),
        torch.stack([words(row != 0) for row in votes_WN]),
    )


def random_votes(workers: int, seed: int, zeros: bool, numel: int = NUMEL) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if zeros:
        return torch.randint(-1, 2, (workers, numel), generator=generator)
    return torch.randint(0, 2, (workers, numel), generator=generator) * 2 - 1


def delta(shard: CountedShard, offset: int, numel: int = NUMEL) -> Tensor:
    all_planes, weights = shard.planes, shard.weights
    if shard.ties is not None:
        all_planes = torch.cat([all_planes, shard.ties.unsqueeze(0)])
        weights = (*weights, 1)
    packed_delta = PackedDelta(all_planes.contiguous().view(torch.uint8), weights, offset)
    return packed_delta.read(0, torch.full((numel,), torch.nan))


def valid(numel: int = NUMEL) -> Tensor:
    return words(torch.ones(numel, dtype=torch.bool))


@pytest.mark.parametrize("zeros", [False, True])
@given(
    workers=st.integers(1, 40) | st.sampled_from([63, 64, 127, 128, 200, 257]), seed=st.integers(0)
)
@settings(deadline=None, max_examples=60)
def test_rules_are_their_formulas(zeros: bool, workers: int, seed: int) -> None:
    """Up to more workers than a byte counts."""
    votes = random_votes(workers, seed % 2**31, zeros)
    plus, nonzero = planes(votes)
    total = votes.sum(0).float()
    for rule, expected in ((Majority(), total.sign()), (Average(), total / workers)):
        shard = rule.count(plus, nonzero if zeros else None, valid(), 0)
        got = delta(shard, rule.offset(workers))
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), rule


@pytest.mark.parametrize("workers", [63, 64, 127, 128])
def test_unanimous_votes_of_as_many_as_a_byte_holds(workers: int) -> None:
    """P - M + n reaches 2 n: beyond 127 it needs the sign's bit of a byte, beyond 255 a ninth."""
    votes = torch.ones(workers, NUMEL, dtype=torch.int64)
    votes[:, 64:] = -1
    for nonzero in (None, planes(votes)[1]):
        shard = Average().count(planes(votes)[0], nonzero, valid(), 0)
        assert torch.equal(delta(shard, workers), votes[0].float())


@pytest.mark.parametrize("workers", [2, 3])
def test_padding_is_no_tie(workers: int) -> None:
    """All planes are 0 there, as if nobody voted: it costs no second plane and no draw."""

    def never(shard: int, count: int) -> Tensor:
        raise AssertionError("nothing is to be drawn")

    votes = torch.ones(workers, 70, dtype=torch.int64)
    plus, nonzero = planes(votes)
    for rule in (Majority(), Majority(never)):
        for given_nonzero in (None, nonzero):
            assert rule.count(plus, given_nonzero, valid(70), 0).ties is None


def test_a_draw_decides_contested_ties_and_nothing_else() -> None:
    """By hand, four workers: won, lost, a tie, a tie of two, nobody votes."""
    columns = torch.tensor([[1, 1, 1, 1], [1, -1, -1, -1], [1, 1, -1, -1], [1, -1, 0, 0], [0] * 4])
    votes = columns.T.repeat(1, 20)
    asked = []

    def draw(bit: int) -> Any:
        def drawn(shard: int, count: int) -> Tensor:
            asked.append((shard, count))
            return torch.full((count,), -bit, dtype=torch.int64)

        return drawn

    plus, nonzero = planes(votes)
    for bit, expected in ((1, [1.0, -1.0, 1.0, 1.0, 0.0]), (0, [1.0, -1.0, -1.0, -1.0, 0.0])):
        shard = Majority(draw(bit)).count(plus, nonzero, valid(100), 3)
        assert torch.equal(delta(shard, 1, 100), torch.tensor(expected).repeat(20))
    assert asked == [(3, 2), (3, 2)]  # its shard, and 16 bytes of 100 places


@given(start=st.integers(0, 150), count=st.integers(0, 150), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_a_packed_delta_is_read_from_any_place(start: int, count: int, seed: int) -> None:
    votes = random_votes(3, seed, zeros=True, numel=300)
    plus, nonzero = planes(votes)
    shard = Average().count(plus, nonzero, valid(300), 0)
    packed_delta = PackedDelta(shard.planes.view(torch.uint8), shard.weights, 3)
    expected = votes.sum(0)[start : start + count]
    for dtype in (torch.float32, torch.float64):
        out = torch.full((count,), torch.nan, dtype=dtype)
        assert packed_delta.read(start, out) is out
        assert torch.equal(out, expected.to(dtype) / 3)  # a third is rounded once, in `dtype`
