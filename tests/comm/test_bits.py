from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.comm.bits import (
    pack_bits,
    pack_bits_part,
    pack_nibbles,
    packed_bits_size,
    packed_nibbles_size,
    unpack_bits,
    unpack_bits_part,
    unpack_nibbles,
)

# Every length up to two paddings of flags, and the neighbours of larger ones.
NUMELS = st.integers(0, 130) | st.builds(
    lambda words, offset: 64 * words + offset, st.integers(3, 40), st.integers(-2, 2)
)
SEEDS = st.integers(0, 2**31 - 1)


def random_flags(numel: int, seed: int) -> Tensor:
    return torch.rand(numel, generator=torch.Generator().manual_seed(seed)) > 0.5


def random_codes(numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (numel,), dtype=torch.uint8, generator=generator)


@given(numel=NUMELS, seed=SEEDS)
@settings(deadline=None)
def test_unpacked_bits_are_the_packed_ones(numel: int, seed: int) -> None:
    flags = random_flags(numel, seed)
    packed = pack_bits(flags)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bits_size(numel)
    assert torch.equal(unpack_bits(packed, numel), flags)


@given(numel=NUMELS, seed=SEEDS)
@settings(deadline=None)
def test_unpacked_nibbles_are_the_packed_ones(numel: int, seed: int) -> None:
    codes = random_codes(numel, seed)
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_nibbles_size(numel)
    assert torch.equal(unpack_nibbles(packed, numel), codes)


@given(numel=NUMELS, seed=SEEDS)
@settings(deadline=None)
def test_packed_bits_are_numpys_of_the_padded_eight_row_view(numel: int, seed: int) -> None:
    """numpy knows nothing of our code: this pins the layout, and that padding is zero."""
    flags = random_flags(numel, seed)
    padded = np.zeros(8 * packed_bits_size(numel), dtype=bool)
    padded[:numel] = flags.numpy()
    expected = np.packbits(padded.reshape(8, -1), axis=0, bitorder="little").reshape(-1)
    assert np.array_equal(pack_bits(flags).numpy(), expected)


@given(numel=NUMELS, seed=SEEDS)
@settings(deadline=None)
def test_packed_nibbles_are_the_first_half_low_and_the_second_half_high(
    numel: int, seed: int
) -> None:
    codes = random_codes(numel, seed)
    padded = np.zeros(2 * packed_nibbles_size(numel), dtype=np.uint8)
    padded[:numel] = codes.numpy()
    low, high = padded.reshape(2, -1)
    assert np.array_equal(pack_nibbles(codes).numpy(), low | high << 4)


@pytest.mark.parametrize("row", range(8))
def test_one_flag_sets_one_bit(row: int) -> None:
    """By hand: 64 flags are 8 rows of 8, so flag 8 * row + 5 is bit `row` of byte 5."""
    flags = torch.zeros(64, dtype=torch.bool)
    flags[8 * row + 5] = True
    assert pack_bits(flags).tolist() == [0, 0, 0, 0, 0, 1 << row, 0, 0]


def test_one_byte_of_bits_by_hand() -> None:
    """Byte 0 of 64 flags holds flags 0, 8, 16, ..., 56; here 0, 8 and 56 are set."""
    flags = torch.zeros(64, dtype=torch.bool)
    flags[[0, 8, 56]] = True
    assert pack_bits(flags)[0] == 0b1000_0011


def test_one_byte_of_nibbles_by_hand() -> None:
    """16 codes are 2 rows of 8: byte 0 holds code 0 below and code 8 above."""
    codes = torch.zeros(16, dtype=torch.uint8)
    codes[0], codes[8], codes[15] = 0x3, 0xA, 0xF
    assert pack_nibbles(codes).tolist() == [0xA3, 0, 0, 0, 0, 0, 0, 0xF0]


@pytest.mark.parametrize(
    ("numel", "bits_bytes", "nibbles_bytes"),
    [(0, 0, 0), (1, 8, 8), (16, 8, 8), (17, 8, 16), (64, 8, 32), (65, 16, 40), (129, 24, 72)],
)
def test_sizes_by_hand(numel: int, bits_bytes: int, nibbles_bytes: int) -> None:
    assert packed_bits_size(numel) == bits_bytes
    assert packed_nibbles_size(numel) == nibbles_bytes


def test_a_bitwise_vote_on_words_is_a_vote_on_flags() -> None:
    """What the layout is for: three ballots, majority word by word, 64 flags at a time."""
    a, b, c = (random_flags(1000, seed) for seed in range(3))
    x, y, z = (pack_bits(flags).view(torch.int64) for flags in (a, b, c))
    majority = (x & y) | ((x ^ y) & z)
    expected = a.int() + b.int() + c.int() >= 2
    assert torch.equal(unpack_bits(majority.view(torch.uint8), 1000), expected)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_out_is_filled_whole_and_handed_back(numel: int) -> None:
    """The buffers come dirty: what an earlier call left must not shine through, in padding too."""
    flags, codes = random_flags(numel, 0), random_codes(numel, 0)
    bits = torch.full((packed_bits_size(numel),), 0xFF, dtype=torch.uint8)
    nibbles = torch.full((packed_nibbles_size(numel),), 0xFF, dtype=torch.uint8)
    flags_out = torch.ones(numel, dtype=torch.bool)
    codes_out = torch.full((numel,), 0xFF, dtype=torch.uint8)

    assert pack_bits(flags, out=bits) is bits
    assert torch.equal(bits, pack_bits(flags))
    assert unpack_bits(bits, numel, out=flags_out) is flags_out
    assert torch.equal(flags_out, flags)
    assert pack_nibbles(codes, out=nibbles) is nibbles
    assert torch.equal(nibbles, pack_nibbles(codes))
    assert unpack_nibbles(nibbles, numel, out=codes_out) is codes_out
    assert torch.equal(codes_out, codes)


def test_slices_with_gaps_and_odd_offsets_are_packed_too() -> None:
    """A bucket is a slice of a larger buffer and need not begin at a whole word."""
    flags, codes = random_flags(300, 1), random_codes(300, 1)
    assert torch.equal(pack_bits(flags[3:280:2]), pack_bits(flags[3:280:2].clone()))
    assert torch.equal(pack_nibbles(codes[3:280:2]), pack_nibbles(codes[3:280:2].clone()))
    assert torch.equal(unpack_bits(pack_bits(flags[5:205]), 200), flags[5:205])


@given(
    numel=NUMELS,
    cuts=st.lists(st.integers(0, 2700), max_size=4),
    longer=st.integers(0, 3),
    seed=SEEDS,
)
@settings(deadline=None)
def test_parts_of_any_length_make_the_same_bytes(
    numel: int, cuts: list[int], longer: int, seed: int
) -> None:
    """Into a buffer that is longer by whole words, as one is that is dealt out to ranks."""
    flags = random_flags(numel, seed)
    size = packed_bits_size(numel) + 8 * longer
    padded = torch.zeros(8 * size, dtype=torch.bool)
    padded[:numel] = flags
    packed = torch.zeros(size, dtype=torch.uint8)
    places = sorted({0, numel, *(cut % max(numel, 1) for cut in cuts)})
    for start, stop in itertools.pairwise(places):
        pack_bits_part(flags[start:stop], start, packed)
    assert torch.equal(packed, pack_bits(padded))

    for start, stop in itertools.pairwise(places):
        out = torch.full((stop - start,), 0xFF, dtype=torch.uint8)
        unpack_bits_part(packed, start, out)
        assert torch.equal(out, flags[start:stop].to(torch.uint8))


@pytest.mark.parametrize("numel", [5, 64, 65, 300])
def test_flags_that_are_left_out_stay_zero(numel: int) -> None:
    """A parameter without a gradient in the middle of a bucket, and one in front."""
    flags = torch.ones(numel, dtype=torch.bool)
    for kept in ((range(2), range(3, numel)), (range(2, numel),)):
        packed = torch.zeros(packed_bits_size(numel), dtype=torch.uint8)
        expected = torch.zeros(numel, dtype=torch.bool)
        for part in kept:
            pack_bits_part(flags[part.start : part.stop], part.start, packed)
            expected[part.start : part.stop] = True
        assert torch.equal(packed, pack_bits(expected))


FLAGS = torch.zeros(65, dtype=torch.bool)
CODES = torch.zeros(65, dtype=torch.uint8)
PACKED = torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_bits(FLAGS.float()), r"`flags` came as torch\.float32, but must be .*bool"),
        (lambda: pack_bits(FLAGS, out=FLAGS), r"`out` came as torch\.bool, but must be .*uint8"),
        (lambda: unpack_bits(PACKED.char(), 65), r"`packed` came as torch\.int8, but must be"),
        (lambda: unpack_bits(PACKED, 65, out=CODES), r"`out` came as torch\.uint8, but must be"),
        (lambda: pack_nibbles(CODES.int()), r"`codes` came as torch\.int32, but must be .*uint8"),
        (lambda: unpack_nibbles(FLAGS, 65), r"`packed` came as torch\.bool, but must be"),
    ],
)
def test_a_wrong_dtype_is_refused(call, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: pack_bits(FLAGS.view(5, 13)),
            r"`flags` came in shape \(5, 13\), but must be flat",
        ),
        (lambda: pack_nibbles(CODES.view(5, 13)), r"`codes` came in shape \(5, 13\)"),
        (lambda: pack_bits(FLAGS, out=PACKED[:8]), "`out` came with 8 elements, but must have 16"),
        (lambda: unpack_bits(PACKED, 64), "`packed` came with 16 elements, but must have 8"),
        (lambda: unpack_bits(PACKED, 65, out=FLAGS[1:]), "`out` came with 64 .* must have 65"),
        (lambda: unpack_nibbles(PACKED, 33), "`packed` came with 16 elements, but must have 24"),
        (lambda: pack_bits(FLAGS, out=PACKED.to("meta")), "`out` came on meta, .* is on cpu"),
        (lambda: packed_bits_size(-1), "`numel=-1` is negative"),
        (lambda: unpack_nibbles(PACKED, -1), "`numel=-1` is negative"),
        (lambda: pack_nibbles(CODES + 16), "`codes` holds 16, but a 4-bit code is 0 to 15"),
    ],
)
def test_a_wrong_size_place_or_value_is_refused(call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 65, 100_003])
def test_a_gpu_packs_the_same_bytes(numel: int) -> None:
    flags, codes = random_flags(numel, 0), random_codes(numel, 0)
    bits, nibbles = pack_bits(flags.cuda()), pack_nibbles(codes.cuda())
    assert torch.equal(bits.cpu(), pack_bits(flags))
    assert torch.equal(nibbles.cpu(), pack_nibbles(codes))
    assert torch.equal(unpack_bits(bits, numel).cpu(), flags)
    assert torch.equal(unpack_nibbles(nibbles, numel).cpu(), codes)
