"""Int2 against payloads that numpy makes value by value, from the documented layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_commfree.diloco.codec import BLOCK, Codec, Int2Codec, decode_all
from tests.planes import pack_codes

INT2 = {"loops": Int2Codec(), "torch operations": Int2Codec(compiled=False)}
NUMELS = [1, 3, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 4096, 5000, 3 * 4096 + 77]


def two_bits(values: np.ndarray) -> tuple[float, list[int]]:
    """The scale of one block, before it is rounded to bf16, and its codes; in float64."""
    _, exponent = math.frexp(float(abs(values).max()))
    whole = np.rint(abs(values).astype(np.float64) * 2.0 ** (8 - exponent))
    is_high = whole**2 > np.float32((whole**2).sum()) / np.float32(len(values))
    levels = np.where(is_high, 3, 1)
    scale = np.float32((whole * levels).sum() / (levels**2).sum()) * 2.0 ** (exponent - 8)
    codes = [
        (1 - int(h)) if np.signbit(v) else (2 + int(h))
        for v, h in zip(values, is_high, strict=True)
    ]
    return float(scale) if whole.any() else 0.0, codes


def payload_of(scales: list[float], *parts: Tensor) -> Tensor:
    return torch.cat([torch.tensor(scales).bfloat16().view(torch.uint8), *parts])


def int2_by_hand(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the payload and the decoded values."""
    scales, codes = [], []
    for block in values.split(BLOCK):
        scale, of_block = two_bits(block.numpy())
        scales.append(scale)
        codes += of_block
    levels = torch.tensor([-3.0, -1.0, 1.0, 3.0])[torch.tensor(codes)]
    rounded = torch.tensor(scales).bfloat16().float().repeat_interleave(BLOCK)
    packed = pack_codes(torch.tensor(codes, dtype=torch.uint8), 2)
    return payload_of(scales, packed), levels * rounded[: len(values)]


def kinds(numel: int) -> dict[str, Tensor]:
    values = torch.randn(numel)
    return {
        "normal": values,
        "of many magnitudes": values * torch.exp(3 * torch.randn(numel)),
        "by block": torch.ldexp(values, 20 * (torch.arange(numel) // BLOCK % 7) - 60),
        "mostly zeros": values * (torch.rand(numel) < 0.01),
        "ties": torch.randint(-2, 3, (numel,)).float(),
        "zeros": torch.zeros(numel),
    }


def check(codec: Codec, expected: tuple[Tensor, Tensor], values: Tensor) -> None:
    payload, decoded = expected
    assert codec.num_bytes(len(values)) == len(payload)
    found = torch.full_like(payload, 0xA5)
    residual = torch.full_like(values, math.nan)
    codec.encode(values, found, residual)
    assert torch.equal(found, payload)
    assert torch.equal(decode_all(codec, payload, torch.full_like(values, math.pi)), decoded)
    assert torch.equal(residual, values - decoded)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("way", INT2)
def test_int2_is_what_numpy_makes_by_hand(way: str, numel: int) -> None:
    for values in kinds(numel).values():
        check(INT2[way], int2_by_hand(values), values)


@pytest.mark.parametrize("distribution", ["normal", "laplace", "one outlier"])
def test_what_is_decoded_is_a_projection_so_that_error_feedback_converges(
    distribution: str,
) -> None:
    """The error and what is decoded are orthogonal, up to the rounding of scale and sums."""
    values = torch.randn(64 * BLOCK)
    if distribution == "laplace":
        values = values.sign() * values.abs().log()
    elif distribution == "one outlier":
        values[::BLOCK] += 1000
    residual = torch.empty_like(values)
    payload = torch.empty(Int2Codec().num_bytes(len(values)), dtype=torch.uint8)
    Int2Codec().encode(values, payload, residual)
    decoded = values - residual
    assert residual.norm() < values.norm()
    assert abs(float(decoded @ residual)) < 0.02 * float(decoded.norm() * values.norm())


def test_the_error_on_normal_values_is_the_one_in_the_docstring() -> None:
    values = torch.randn(1000 * BLOCK, generator=torch.Generator().manual_seed(0))
    residual = torch.empty_like(values)
    payload = torch.empty(Int2Codec().num_bytes(len(values)), dtype=torch.uint8)
    Int2Codec().encode(values, payload, residual)
    assert float(residual.norm() / values.norm()) == pytest.approx(0.345, abs=0.001)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.5 * 2.0**120])
def test_what_is_not_finite_makes_its_block_nan(bad: float) -> None:
    values = torch.randn(2 * 4096)
    values[4096 + 7] = bad
    for codec in (Int2Codec(), Int2Codec(compiled=False)):
        payload = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8)
        codec.encode(values, payload)
        decoded = decode_all(codec, payload, torch.empty_like(values))
        assert decoded[4096 : 4096 + BLOCK].isnan().all()
        assert decoded[:4096].isfinite().all()
        assert decoded[4096 + BLOCK :].isfinite().all()
