"""Parts of packed buffers against the numpy layout of `tests.planes`, and that layout by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.comm.bits import (
    lift_nibbles_part,
    pack_bits_part,
    pack_codes_part,
    packed_size,
    unpack_bits_part,
    unpack_codes_part,
)
from tests.planes import pack_bits, pack_codes, unpack_bits, unpack_codes

# Every length up to two paddings of flags, and the neighbours of larger ones.
NUMELS = st.integers(0, 130) | st.builds(
    lambda words, offset: 64 * words + offset, st.integers(3, 40), st.integers(-2, 2)
)
CUTS = st.lists(st.integers(0, 2700), max_size=4)
SEEDS = st.integers(0, 2**31 - 1)


def random_flags(numel: int, seed: int) -> Tensor:
    return torch.rand(numel, generator=torch.Generator().manual_seed(seed)) > 0.5


def random_codes(numel: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (numel,), dtype=torch.uint8, generator=generator)


def parts_of(numel: int, cuts: list[int]) -> list[tuple[int, int]]:
    return [*itertools.pairwise(sorted({0, numel, *(cut % max(numel, 1) for cut in cuts)}))]


@pytest.mark.parametrize("row", range(8))
def test_one_flag_sets_one_bit(row: int) -> None:
    """By hand: 64 flags are 8 rows of 8, so flag 8 * row + 5 is bit `row` of byte 5."""
    flags = torch.zeros(64, dtype=torch.bool)
    flags[8 * row + 5] = True
    packed = torch.zeros(8, dtype=torch.uint8)
    pack_bits_part(flags, 0, packed)
    assert packed.tolist() == [0, 0, 0, 0, 0, 1 << row, 0, 0] == pack_bits(flags).tolist()


def test_one_byte_of_nibbles_by_hand() -> None:
    """16 codes are 2 rows of 8: byte 0 holds code 0 below and code 8 above."""
    codes = torch.zeros(16, dtype=torch.uint8)
    codes[0], codes[8], codes[15] = 0x3, 0xA, 0xF
    packed = torch.empty(8, dtype=torch.uint8)
    pack_codes_part(codes, 4, 0, packed)
    assert packed.tolist() == [0xA3, 0, 0, 0, 0, 0, 0, 0xF0] == pack_codes(codes, 4).tolist()


def test_one_byte_of_two_bit_codes_by_hand() -> None:
    """32 codes are 4 rows of 8: byte 0 holds the codes 0, 8, 16 and 24, lowest bits first."""
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[0], codes[8], codes[16], codes[24], codes[31] = 1, 2, 3, 0, 2
    packed = torch.empty(8, dtype=torch.uint8)
    pack_codes_part(codes, 2, 0, packed)
    first = 0b00_11_10_01
    assert packed.tolist() == [first, 0, 0, 0, 0, 0, 0, 0x80] == pack_codes(codes, 2).tolist()


@given(numel=NUMELS, cuts=CUTS, longer=st.integers(0, 3), seed=SEEDS)
@settings(deadline=None)
def test_flags_in_parts_of_any_length(numel: int, cuts: list[int], longer: int, seed: int) -> None:
    """Into a buffer that is longer by whole words, as one that is split between ranks."""
    flags = random_flags(numel, seed)
    padded = torch.zeros(8 * (pack_bits(flags).numel() + 8 * longer), dtype=torch.bool)
    padded[:numel] = flags
    packed = torch.zeros(padded.numel() // 8, dtype=torch.uint8)
    for start, stop in parts_of(numel, cuts):
        pack_bits_part(flags[start:stop], start, packed)
    assert torch.equal(packed, pack_bits(padded))
    assert torch.equal(unpack_bits(packed, numel), flags)

    for start, stop in parts_of(numel, cuts):
        out = torch.full((stop - start,), 0xFF, dtype=torch.uint8)
        unpack_bits_part(packed, start, out)
        assert torch.equal(out, flags[start:stop].to(torch.uint8))


@given(numel=NUMELS, bits=st.sampled_from([2, 4]), cuts=CUTS, seed=SEEDS)
@settings(deadline=None)
def test_codes_in_parts_of_any_length(numel: int, bits: int, cuts: list[int], seed: int) -> None:
    """The buffer is dirty before: every byte of it, the padding too, is written."""
    codes = random_codes(numel, bits, seed)
    packed = torch.full((packed_size(numel, bits),), 0xFF, dtype=torch.uint8)
    for start, stop in parts_of(numel, cuts):
        pack_codes_part(codes[start:stop], bits, start, packed)
    assert torch.equal(packed, pack_codes(codes, bits))
    assert torch.equal(unpack_codes(packed, bits, numel), codes)

    for start, stop in parts_of(numel, cuts):
        out = torch.full((stop - start,), 0xFF, dtype=torch.uint8)
        unpack_codes_part(packed, bits, start, out)
        assert torch.equal(out, codes[start:stop])
        if bits == 4:
            words = torch.zeros(stop - start, dtype=torch.int16)
            lift_nibbles_part(packed, start, words)
            assert torch.equal((words >> 12 & 15).to(torch.uint8), codes[start:stop])


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 65, 100_003])
def test_a_gpu_packs_the_same_bytes(numel: int) -> None:
    flags = random_flags(numel, 0)
    bits = torch.zeros(-(-numel // 64) * 8, dtype=torch.uint8, device="cuda")
    pack_bits_part(flags.cuda(), 0, bits)
    assert torch.equal(bits.cpu(), pack_bits(flags))
    for size in (2, 4):
        codes = random_codes(numel, size, 0)
        packed = torch.zeros(packed_size(numel, size), dtype=torch.uint8, device="cuda")
        pack_codes_part(codes.cuda(), size, 0, packed)
        assert torch.equal(packed.cpu(), pack_codes(codes, size))
