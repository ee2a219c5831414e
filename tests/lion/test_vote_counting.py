"""Bit-sliced counting against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.lion.vote import add, compare, compare_to, count_ones

WORDS = 3


def random_planes(planes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (planes, 8 * WORDS), dtype=torch.uint8, generator=generator)
    return raw.view(torch.int64)


def bits(plane: Tensor) -> np.ndarray:
    """The bits of a plane one by one; numpy knows nothing of our code."""
    return np.unpackbits(plane.numpy().view(np.uint8)).astype(np.int64)


def numbers(digits: list[Tensor]) -> np.ndarray:
    return sum((bits(digit) << place for place, digit in enumerate(digits)), np.int64(0))


@pytest.mark.parametrize("workers", [*range(1, 18), 31, 32, 33, 127, 128, 200])
def test_counts_are_the_numbers_of_set_bits(workers: int) -> None:
    flags = random_planes(workers, seed=workers)
    flags[:, 0] = -1  # all set: the largest count there is
    flags[:, 1] = 0
    counts = count_ones(flags)
    assert len(counts) == workers.bit_length()
    expected = sum(bits(plane) for plane in flags)
    assert np.array_equal(numbers(counts), expected)
    assert expected.max() == workers
    assert expected.min() == 0


@pytest.mark.parametrize("workers", range(1, 6))
def test_all_ballots_of_few_workers(workers: int) -> None:
    """Bit i of worker w's plane is bit w of i: all 2^W ballots side by side."""
    ballots = torch.arange(64).unsqueeze(0) >> torch.arange(workers).unsqueeze(1) & 1
    raw = np.packbits(ballots.numpy().astype(np.uint8), axis=1)
    counts = count_ones(torch.from_numpy(raw).view(torch.int64))
    assert np.array_equal(numbers(counts), ballots.sum(0).numpy())


def test_counting_changes_no_ballot() -> None:
    flags = random_planes(7, seed=0)
    before = flags.clone()
    count_ones(flags)
    assert torch.equal(flags, before)


@pytest.mark.parametrize("digits", range(1, 6))
@pytest.mark.parametrize("bound", [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 100])
def test_compare_to_a_bound(digits: int, bound: int) -> None:
    """Bounds of more digits than the numbers have, too."""
    planes = list(random_planes(digits, seed=digits))
    greater, equal = compare_to(planes, bound)
    assert np.array_equal(bits(greater), numbers(planes) > bound)
    assert np.array_equal(bits(equal), numbers(planes) == bound)


@given(digits=st.integers(1, 6), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_compare_two_numbers(digits: int, seed: int) -> None:
    a, b = (list(half) for half in random_planes(2 * digits, seed).view(2, digits, WORDS))
    b[0] = a[0].clone()  # else equal ones are rare
    greater, equal = compare(a, b)
    assert np.array_equal(bits(greater), numbers(a) > numbers(b))
    assert np.array_equal(bits(equal), numbers(a) == numbers(b))


@given(longer=st.integers(1, 6), shorter=st.integers(1, 6), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_add_numbers_of_any_lengths(longer: int, shorter: int, seed: int) -> None:
    planes = list(random_planes(longer + shorter, seed))
    a, b = planes[:longer], planes[longer:]
    total = add(a, b)
    assert len(total) == max(longer, shorter) + 1
    assert np.array_equal(numbers(total), numbers(a) + numbers(b))
