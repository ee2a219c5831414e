"""Parameters to buckets: a partition in reverse order, of whole words for every shard."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_commfree.lion.buckets import split_into_buckets


def named(sizes: list[int], device: str = "cpu") -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(s, device=device))) for i, s in enumerate(sizes)]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    shards=st.integers(1, 9),
    full=st.integers(1, 600),
)
@settings(deadline=None, max_examples=200)
def test_every_parameter_has_its_place(sizes: list[int], shards: int, full: int) -> None:
    parameters = named(sizes)
    buckets = split_into_buckets(parameters, shards, full)
    listed = [pair for b in buckets for pair in zip(b.names, b.parameters, strict=True)]
    assert [name for name, _ in listed] == [name for name, _ in reversed(parameters)]
    assert all(p is q for (_, p), (_, q) in zip(listed, reversed(parameters), strict=True))
    for index, bucket in enumerate(buckets):
        lengths = [p.numel() for p in bucket.parameters]
        assert bucket.index == index
        assert len(bucket.parameters) == len(lengths)
        assert list(bucket.starts) == [sum(lengths[:i]) for i in range(len(lengths))]
        assert bucket.numel == sum(lengths)
        # 64 places a word, as many words for every shard, at least one
        assert bucket.plane_bytes % (8 * shards) == 0
        assert 8 * bucket.plane_bytes >= bucket.numel
        assert 8 * bucket.plane_bytes - bucket.numel < 64 * shards or bucket.numel == 0
        # closed when it is full and not before
        assert bucket.numel >= full or index == len(buckets) - 1
        assert bucket.numel - lengths[-1] < full


def test_no_parameter_no_bucket() -> None:
    assert split_into_buckets([], 2) == []


@pytest.mark.parametrize(
    ("millions", "expected"),
    [(1, 4), (8, 16), (64, 16), (160, 40)],  # 2^18 at least, 1/16 of the model, 2^22 at most
)
def test_buckets_grow_with_the_model(millions: int, expected: int) -> None:
    sizes = [1 << 18] * (4 * millions)
    buckets = split_into_buckets(named(sizes, device="meta"), 2)
    assert len(buckets) == expected
    assert len({bucket.numel for bucket in buckets}) == 1


def test_a_bucket_is_on_one_device() -> None:
    """Its ballot is one buffer."""
    parameters = [*named([5, 6]), *named([7, 8], device="meta"), *named([9])]
    buckets = split_into_buckets(parameters, 2, 1000)
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == [[9], [8, 7], [6, 5]]
