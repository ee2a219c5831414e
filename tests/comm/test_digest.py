"""A hash of bits: what must be equal is, and one bit more or less is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.comm.digest import digest, mix_digests, thorough_digest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool]


def random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def weights(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


@given(
    count=st.integers(1, 40) | st.integers(8180, 8210) | st.integers(16370, 26000),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@settings(deadline=None, max_examples=80)
def test_a_flipped_bit_anywhere_is_seen(count: int, seed: int, data: st.DataObject) -> None:
    """Lengths about a word, about a row of 8184 bytes, and of some rows with a rest."""
    raw = random_bytes(count, seed)
    before = int(digest(raw))
    assert int(digest(raw.clone())) == before
    raw[data.draw(st.integers(0, count - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = int(digest(raw))
    assert after != before
    assert after % 2**32 != before % 2**32, "there are users of the lower half alone"


@given(
    count=st.integers(1, 40) | st.integers((1 << 20) - 9, (1 << 20) + 9) | st.just(5 << 19),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_the_thorough_one_sees_a_flipped_bit_too(
    count: int, seed: int, data: st.DataObject
) -> None:
    raw = random_bytes(count, seed)
    before = int(thorough_digest(raw))
    assert int(thorough_digest(raw.clone())) == before
    raw[data.draw(st.integers(0, count - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert int(thorough_digest(raw)) != before


def test_the_thorough_one_sees_changes_that_cancel_out_in_rows_and_columns() -> None:
    words = torch.arange(5 * 1023)
    changed = words.clone()
    for place, by in ((3, 1), (1020, -1), (2 * 1023 + 3, -1), (2 * 1023 + 1020, 1)):
        changed[place] += by
    assert int(digest(changed)) == int(digest(words))
    assert int(thorough_digest(changed)) != int(thorough_digest(words))


@given(count=st.integers(2, 9000), seed=st.integers(0, 2**31), data=st.data())
@settings(deadline=None, max_examples=80)
def test_values_that_change_places_are_seen(count: int, seed: int, data: st.DataObject) -> None:
    """A plain sum would not see it."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    i, j = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    swapped = values.clone()
    swapped[i], swapped[j] = values[j], values[i]
    same = torch.equal(values, swapped)
    assert (int(digest(values)) == int(digest(swapped))) == same
    assert torch.allclose(values.double().sum(), swapped.double().sum())


def negated(values: Tensor) -> Tensor:
    return -values


def every_second_negated(values: Tensor) -> Tensor:
    changed = values.clone()
    changed[1::2].neg_()
    return changed


def a_stretch_negated(values: Tensor) -> Tensor:
    """Longer than a row of the hash where there is one."""
    changed = values.clone()
    changed[len(values) // 4 : len(values) // 4 * 3].neg_()
    return changed


def a_little_more_of_all(values: Tensor) -> Tensor:
    """The least bit of every value, which changes all by as much."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return (values.clone().view(bits) ^ 1).view(values.dtype)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("numel", [4, 96, 2046, 2048, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "change", [negated, every_second_negated, a_stretch_negated, a_little_more_of_all]
)
def test_the_same_change_of_many_values_shows_in_both_halves(
    change: Callable[[Tensor], Tensor], dtype: torch.dtype, numel: int, zeros: bool
) -> None:
    """An even number of equal changes must not cancel out, of signs of zeros least of all."""
    values = torch.zeros(numel, dtype=dtype) if zeros else weights(numel).to(dtype)
    before, after = int(digest(values)), int(digest(change(values)))
    assert after % 2**32 != before % 2**32
    assert after >> 32 != before >> 32


def test_rows_that_change_places_are_seen() -> None:
    """The sums over columns stay, those over rows come in another order."""
    rows = weights(8 * 2046).view(8, 2046)
    assert int(digest(rows)) != int(digest(rows.flip(0).contiguous()))
    columns = rows.roll(2, dims=1).contiguous()  # and here those over rows stay
    assert int(digest(rows)) != int(digest(columns))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype: torch.dtype) -> None:
    """What counts are the bits in order, and nothing else."""
    values = (weights(6 * 35) * 10).to(dtype)
    code = digest(values)
    assert code.dtype == torch.int64
    assert code.ndim == 0
    assert int(code) == int(digest(values.view(6, 5, 7))) != 0
    assert int(digest(values[0])) == int(digest(values[:1]))
    other = values.clone()
    other[-1] = not other[-1] if dtype == torch.bool else other[-1] + 1
    assert int(digest(other)) != int(code)


@pytest.mark.parametrize("offset", range(10))
def test_a_view_that_begins_anywhere_hashes_as_a_copy(offset: int) -> None:
    """Words of 8 bytes cannot be read from every place."""
    raw = random_bytes(18000, 3)[offset : offset + 16391]
    assert int(digest(raw)) == int(digest(raw.clone()))
    halves = weights(5000).bfloat16()[offset:]
    assert int(digest(halves)) == int(digest(halves.clone()))


@given(codes=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=6), data=st.data())
@settings(deadline=None)
def test_the_mix_of_digests_knows_their_order(codes: list[int], data: st.DataObject) -> None:
    """The formula in whole numbers that do not wrap, and 2^64 taken off at the end."""
    prime, word = 0x9E3779B1, 1 << 64
    total = sum((c * prime + 1) * (2 * i + 1) * prime for i, c in enumerate(codes))
    wrapped = (total + word // 2) % word - word // 2
    assert int(mix_digests(torch.tensor(codes))) == wrapped
    i = data.draw(st.integers(1, len(codes) - 1))
    swapped = [codes[i], *codes[1:i], codes[0], *codes[i + 1 :]]
    differ = 2 * i * prime**2 * (codes[0] - codes[i]) % word  # odd times 2 i times the difference
    assert (int(mix_digests(torch.tensor(swapped))) != wrapped) == bool(differ)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 5, 1024, 100_003])
def test_a_gpu_hashes_as_a_cpu(dtype: torch.dtype, numel: int) -> None:
    values = (weights(numel) * 10).to(dtype)
    assert int(digest(values.cuda())) == int(digest(values))
    if numel:
        assert int(thorough_digest(values.cuda())) == int(thorough_digest(values))
