"""Shards of a tensor: contents on each rank, and joining them again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.domino import ShardSpec


def counting(*shape: int) -> Tensor:
    """A tensor of different numbers."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


@given(
    dim=st.integers(0, 2),
    size=st.integers(1, 9),
    ranks=st.integers(1, 5),
    others=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_even_parts_join_to_the_whole(
    dim: int, size: int, ranks: int, others: tuple[int, int]
) -> None:
    """Sizes that the ranks do not divide, too, and ranks that hold padding only."""
    whole = counting(*others[:dim], size, *others[dim:])
    spec = ShardSpec.even(dim, size, ranks)
    parts = [spec.shard(whole, rank) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    assert torch.cat(parts, dim).sum() == whole.sum()  # the padding is zeros
    assert torch.equal(spec.join(parts), whole)
    assert torch.equal(torch.cat(parts, dim).narrow(dim, 0, size), whole)


@given(
    dim=st.integers(0, 1),
    block=st.integers(1, 4),
    blocks=st.integers(1, 4),
    ranks=st.integers(1, 4),
)
def test_packed_blocks_are_cut_one_by_one(dim: int, block: int, blocks: int, ranks: int) -> None:
    size = block * blocks * ranks
    whole = counting(2, size) if dim else counting(size, 2)
    spec = ShardSpec.even(dim, size, ranks, blocks)
    parts = [spec.shard(whole, rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        packed = [b.chunk(ranks, dim)[rank] for b in whole.chunk(blocks, dim)]
        assert torch.equal(part, torch.cat(packed, dim))
    assert torch.equal(spec.join(parts), whole)
    if ranks > 1 and blocks > 1:  # the likely mistake: the packed tensor cut as if it were one
        assert not torch.equal(parts[0], whole.chunk(ranks, dim)[0])


@given(
    key_heads=st.integers(1, 4),
    ranks_per_head=st.integers(1, 4),
    head_dim=st.integers(1, 3),
)
def test_a_shard_on_several_ranks(key_heads: int, ranks_per_head: int, head_dim: int) -> None:
    ranks = key_heads * ranks_per_head
    firsts = [rank // ranks_per_head * head_dim for rank in range(ranks)]
    size = key_heads * head_dim
    spec = ShardSpec(0, tuple((first, first + head_dim) for first in firsts), size)
    whole = counting(size, 2)
    parts = [spec.shard(whole, rank) for rank in range(ranks)]
    assert spec.overlapping == (ranks_per_head > 1)
    assert torch.equal(spec.join(parts), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.split(head_dim)[rank // ranks_per_head])


def test_a_shard_shares_no_memory_with_the_full_tensor() -> None:
    """Otherwise a rank would keep the full tensor alive for its shard."""
    whole = counting(4, 2)
    for spec in (
        ShardSpec.even(0, 4, 2),
        ShardSpec.even(0, 4, 1),
        ShardSpec.even(0, 4, 2, blocks=2),
    ):
        spec.shard(whole, 0).zero_()
        assert torch.equal(whole, counting(4, 2)), spec
