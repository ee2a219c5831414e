"""E3M0 and int8 against the nearest value by brute force, and what becomes of zeros, NaN and
Inf."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.diloco.quantize import (
    BLOCK,
    decode_e3m0,
    decode_int8,
    encode_e3m0,
    encode_int8,
)


def through_e3m0(values: Tensor) -> Tensor:
    return decode_e3m0(*encode_e3m0(values))


def nearest_e3m0(block: Tensor) -> Tensor:
    """By brute force: the nearest of 0 and seven powers of two, ties away from zero."""
    largest = float(block.abs().max())
    if largest == 0.0:
        return torch.zeros_like(block)
    top = math.floor(math.log2(largest))
    top += largest >= 1.5 * 2.0**top
    levels = [0.0] + [2.0 ** (top - k) for k in range(6, -1, -1)]
    out = []
    for value in block.tolist():
        distances = [abs(abs(value) - level) for level in levels]
        best = max(i for i, d in enumerate(distances) if d == min(distances))
        out.append(math.copysign(levels[best], value) if best else 0.0)
    return torch.tensor(out)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.integers(min_value=-60, max_value=60),
)
def test_e3m0_is_the_nearest_value(values: list[float], exponent: int) -> None:
    block = torch.tensor(values, dtype=torch.float32) * 2.0**exponent
    if float(block.abs().max()) < 2.0**-110:
        block = torch.zeros_like(block)
    assert torch.equal(through_e3m0(block), nearest_e3m0(block))


@pytest.mark.parametrize("numel", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_every_block_has_its_own_scale(numel: int) -> None:
    values = torch.randn(numel) * 10.0 ** torch.arange(numel).div(BLOCK, rounding_mode="floor")
    expected = torch.cat([nearest_e3m0(block) for block in values.split(BLOCK)])
    assert torch.equal(through_e3m0(values), expected)


def test_powers_of_two_and_zero_are_exact() -> None:
    values = torch.tensor([4.0, -2.0, 1.0, 0.5, -0.25, 0.125, 0.0625, 0.0, -0.0])
    decoded = through_e3m0(values)
    assert torch.equal(decoded, values)
    assert not decoded[-1].signbit()
    assert torch.equal(through_e3m0(decoded), decoded)


def test_code_and_scale_by_hand() -> None:
    """1.4 rounds to 2^0, whose biased exponent is 127; 2^-6 is code 1, 2^0 code 7; bit 3 is the
    sign."""
    codes, scales = encode_e3m0(torch.tensor([1.4, -1.0, 2.0**-6, 0.0]))
    assert scales.tolist() == [127]
    assert codes.tolist() == [7, 15, 1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("encode", "decode"), [(encode_e3m0, decode_e3m0), (encode_int8, decode_int8)]
)
def test_a_block_with_nan_or_inf_decodes_to_nan(bad: float, encode: object, decode: object) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    decoded = decode(*encode(values))  # type: ignore[operator]
    assert decoded[:BLOCK].isnan().all()
    assert torch.allclose(decoded[BLOCK:], torch.ones(BLOCK), atol=0.0, rtol=1e-6)


def test_tiny_blocks_become_zero_and_huge_ones_do_not_overflow() -> None:
    assert torch.equal(through_e3m0(torch.full((5,), 1e-40)), torch.zeros(5))
    huge = torch.tensor([torch.finfo(torch.float32).max / 2, -1e30])
    assert through_e3m0(huge).isfinite().all()


def test_int8_error_is_half_a_step() -> None:
    values = torch.randn(1000)
    decoded = decode_int8(*encode_int8(values))
    for block, back in zip(values.split(BLOCK), decoded.split(BLOCK), strict=True):
        step = float(block.abs().max()) / 127
        assert float((block - back).abs().max()) <= 0.5 * step * (1 + 1e-5)
    assert torch.equal(decode_int8(*encode_int8(torch.zeros(3))), torch.zeros(3))


def test_cheap_blocks_and_scales_cost_little() -> None:
    """Normal values lose a fifth of their norm; blocks of 64 with an exact scale hardly less."""
    values = torch.randn(256 * 256)
    error = float((through_e3m0(values) - values).norm() / values.norm())
    blocks = values.view(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    exponents = (blocks.abs() / scales * 4 / 3).log2().floor().clamp(-6, 0)
    fine = scales * exponents.exp2() * blocks.sign()
    fine[blocks.abs() < scales * 2.0**-7] = 0.0
    fine_error = float((fine - blocks).norm() / blocks.norm())
    assert error == pytest.approx(0.194, abs=0.005)
    assert fine_error == pytest.approx(0.188, abs=0.005)
