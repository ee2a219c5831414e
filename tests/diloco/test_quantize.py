"""E3M0 and int8 against the nearest value by brute force, and what becomes of zeros, NaN and
Inf."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.diloco import codec as wire_module
from lightning_commfree.diloco.codec import BLOCK, blocks_of, chunks, num_blocks
from lightning_commfree.diloco.quantize import (
    decode_e3m0,
    decode_int8,
    encode_e3m0,
    encode_int8,
)

LEAST_TOP, GREATEST_TOP = -118, 119


def e3m0_of(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.empty(num_blocks(values.numel()), dtype=torch.uint8)
    codes = torch.full((values.numel(),), 0xA5, dtype=torch.uint8)
    for chunk in chunks(values.numel(), values.device):
        blocks, shape = blocks_of(chunk)
        part = encode_e3m0(values[chunk].view(shape), scales[blocks])
        codes[chunk].copy_(part)
    return codes, scales


def int8_of(values: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.int8)
    scales = torch.empty(num_blocks(values.numel()))
    for chunk in chunks(values.numel(), values.device):
        blocks, shape = blocks_of(chunk)
        values_BV, codes_BV = (part[chunk].view(shape) for part in (values, codes))
        encode_int8(values_BV, codes_BV, scales[blocks])
    return codes, scales


def read_codes(codes: Tensor, out: Tensor) -> None:
    """Into bits 12 to 15; those below are full of what must not matter."""
    out.copy_(codes).bitwise_left_shift_(12).bitwise_or_(0x0FFF)


def through_e3m0(values: Tensor) -> Tensor:
    codes, scales = e3m0_of(values)
    decoded = torch.full_like(values, math.pi)
    for chunk in chunks(values.numel(), values.device):
        blocks, shape = blocks_of(chunk)
        out = decoded[chunk].view(shape)
        decode_e3m0(partial(read_codes, codes[chunk]), scales[blocks], out)
    return decoded


def through_int8(values: Tensor) -> Tensor:
    codes, scales = int8_of(values)
    decoded = torch.full_like(values, math.pi)
    for chunk in chunks(values.numel(), values.device):
        blocks, shape = blocks_of(chunk)
        codes_BV, out = (part[chunk].view(shape) for part in (codes, decoded))
        decode_int8(codes_BV, scales[blocks], out)
    return decoded


def reference(block: Tensor) -> Tensor:
    """By brute force, in fp64: the nearest of zero and seven powers of two, ties away from zero."""
    magnitudes = block.double().abs()
    largest = float(magnitudes.max())
    if not math.isfinite(largest):
        return torch.full_like(block, math.nan)
    top = math.frexp(largest)[1] - 1
    top += largest >= 1.5 * 2.0**top
    if top > GREATEST_TOP:
        return torch.full_like(block, math.nan)
    if top < LEAST_TOP:
        return torch.zeros_like(block).copysign(block)
    levels = torch.tensor([2.0 ** (top - k) for k in range(7)] + [0.0], dtype=torch.float64)
    distances = (magnitudes[:, None] - levels).abs()
    nearest = levels[distances.argmin(dim=1)]  # of several least ones the first: the largest level
    return nearest.float().copysign(block)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Signs of zeros count; one NaN is as good as another."""
    got_bits, expected_bits = (
        t.masked_fill(t.isnan(), 1.0).view(torch.int32) for t in (got, expected)
    )
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got_bits, expected_bits)


def any_fp32(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


ALL_CLASSES = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)
NEAR_A_POWER = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.integers(-9, 1),
        st.sampled_from([0, 1, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(ALL_CLASSES)
def test_any_bits_become_the_nearest_value(bits: list[int]) -> None:
    """A block of arbitrary floats holds a NaN or Inf now and then; alone, each is its own block."""
    values = any_fp32(bits)
    assert_same_bits(through_e3m0(values), reference(values))
    for value in values.split(1):
        assert_same_bits(through_e3m0(value), reference(value))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 254), NEAR_A_POWER)
def test_ties_and_their_neighbours_at_every_scale(
    exponent: int, parts: list[tuple[int, int, int]]
) -> None:
    """Values at, one bit above and one bit below every tie, from subnormal ones up to Inf."""
    biased = [(s, min(max(exponent + below, 0), 255), m) for s, below, m in parts]
    values = any_fp32([s << 31 | e << 23 | m for s, e, m in biased])
    assert_same_bits(through_e3m0(values), reference(values))


@pytest.mark.parametrize("chunk", [BLOCK, 2 * BLOCK, None])
@pytest.mark.parametrize("numel", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_every_block_has_its_own_scale(
    numel: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the chunks are in which the blocks are worked on."""
    if chunk is not None:
        monkeypatch.setattr(wire_module, "_CPU_CHUNK", chunk)
    values = torch.randn(numel) * 10.0 ** torch.arange(numel).div(BLOCK, rounding_mode="floor")
    expected = torch.cat([reference(block) for block in values.split(BLOCK)])
    assert_same_bits(through_e3m0(values), expected)
    expected_int8 = torch.cat([through_int8(block) for block in values.split(BLOCK)])
    assert_same_bits(through_int8(values), expected_int8)


def test_code_and_scale_by_hand() -> None:
    """1.4 rounds to 2^0, whose biased exponent is 127; 2^-6 is code 1, 2^0 code 7; bit 3 is the
    sign."""
    codes, scales = e3m0_of(torch.tensor([1.4, -1.0, 2.0**-6, 0.0, -0.0]))
    assert scales.tolist() == [127]
    assert codes.tolist() == [7, 15, 1, 0, 8]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("through", [through_e3m0, through_int8])
def test_a_block_with_nan_or_inf_decodes_to_nan(
    bad: float, through: Callable[[Tensor], Tensor]
) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    values[5:9] = 0.0  # zero times anything must not stay zero
    decoded = through(values)
    assert decoded[:BLOCK].isnan().all()
    torch.testing.assert_close(decoded[BLOCK:], torch.ones(BLOCK), atol=0.0, rtol=1e-6)


def test_int8_codes_by_hand() -> None:
    """Steps of 1: ties go to the even step, the largest magnitude is +-127."""
    codes, scales = int8_of(torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 2.6, 0.0]))
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [127, -127, 0, 2, -2, 3, 0]


@settings(max_examples=100, deadline=None)
@given(ALL_CLASSES)
def test_int8_of_any_bits_is_the_nearest_step_or_nan_or_zero(bits: list[int]) -> None:
    values = any_fp32(bits)
    decoded, largest = through_int8(values), float(values.double().abs().max())
    if not math.isfinite(largest):
        assert decoded.isnan().all()
    elif largest < 2.0**LEAST_TOP:
        assert torch.equal(decoded, torch.zeros_like(values))
    else:
        error = (decoded.double() - values.double()).abs().max()
        assert float(error) <= 0.5 * largest / 127 * (1 + 1e-4)
