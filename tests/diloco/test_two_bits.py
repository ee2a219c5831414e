"""Int2 and top-k against payloads that numpy makes value by value, from the documented layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_commfree.diloco import TopKCodec, quantize
from lightning_commfree.diloco.codec import BLOCK, Codec, Int2Codec, decode_all
from tests.planes import pack_codes

INT2 = {"loops": Int2Codec(), "torch operations": Int2Codec(compiled=False)}
TOPK = {
    "defaults": TopKCodec(),
    "other settings": TopKCodec(chunk=512, keep=9),
    "dense": TopKCodec(chunk=256, keep=256),
}
NUMELS = [1, 3, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 4096, 5000, 3 * 4096 + 77]


def two_bits(values: np.ndarray, low: int, high: int) -> tuple[float, list[int]]:
    """The scale of one block, before it is rounded to bf16, and its codes; in float64."""
    _, exponent = math.frexp(float(abs(values).max()))
    whole = np.rint(abs(values).astype(np.float64) * 2.0 ** (8 - exponent))
    is_high = whole**2 > np.float32((whole**2).sum()) / np.float32(len(values))
    levels = np.where(is_high, high, low)
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
        scale, of_block = two_bits(block.numpy(), 1, 3)
        scales.append(scale)
        codes += of_block
    levels = torch.tensor([-3.0, -1.0, 1.0, 3.0])[torch.tensor(codes)]
    rounded = torch.tensor(scales).bfloat16().float().repeat_interleave(BLOCK)
    packed = pack_codes(torch.tensor(codes, dtype=torch.uint8), 2)
    return payload_of(scales, packed), levels * rounded[: len(values)]


def topk_by_hand(codec: TopKCodec, values: Tensor) -> tuple[Tensor, Tensor]:
    scales, positions, codes = [], [], []
    decoded = torch.zeros(len(values))
    for start in range(0, len(values), codec.chunk):
        chunk = values[start : start + codec.chunk].numpy()
        order = sorted(range(len(chunk)), key=lambda i: (-abs(chunk[i]), i))
        order = [i for i in order if chunk[i] != 0][: codec.keep] or [0]
        order += order[:1] * (codec.keep - len(order))
        scale, of_chunk = two_bits(chunk[order], 3, 4)
        scales.append(scale)
        positions += order
        codes += of_chunk
        rounded = torch.tensor(scale).bfloat16().float()
        for i, code in zip(order, of_chunk, strict=True):
            decoded[start + i] = torch.tensor([-4.0, -3.0, 3.0, 4.0])[code] * rounded
    low = torch.tensor([i % 256 for i in positions], dtype=torch.uint8)
    high = torch.tensor([i // 256 for i in positions], dtype=torch.uint8)
    packed = pack_codes(torch.tensor(codes, dtype=torch.uint8), 2)
    return payload_of(scales, low, pack_codes(high, 4), packed), decoded


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


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("name", TOPK)
def test_topk_is_what_numpy_makes_by_hand(name: str, numel: int) -> None:
    for values in kinds(numel).values():
        check(TOPK[name], topk_by_hand(TOPK[name], values), values)


def test_a_wrong_position_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5000)
    right = quantize.largest

    def shifted(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        positions, selected = right(rows, count)
        return (positions + 1) % rows.shape[1], selected

    monkeypatch.setattr(quantize, "largest", shifted)
    with pytest.raises(AssertionError):
        check(TopKCodec(), topk_by_hand(TopKCodec(), values), values)


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
    for codec in (Int2Codec(), TopKCodec(), TopKCodec(chunk=256, keep=256)):
        payload = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8)
        residual = torch.empty_like(values)
        codec.encode(values, payload, residual)
        decoded = values - residual
        assert residual.norm() < values.norm()
        assert abs(float(decoded @ residual)) < 0.02 * float(decoded.norm() * values.norm())


def test_the_error_on_normal_values_is_the_one_in_the_docstring() -> None:
    values = torch.randn(1000 * BLOCK, generator=torch.Generator().manual_seed(0))
    errors = {}
    for codec in (Int2Codec(), TopKCodec()):
        residual = torch.empty_like(values)
        codec.encode(values, torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8), residual)
        errors[codec.name] = float(residual.norm() / values.norm())
    assert errors[Int2Codec().name] == pytest.approx(0.345, abs=0.001)
    assert errors[TopKCodec().name] == pytest.approx(0.93, abs=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.5 * 2.0**120])
def test_what_is_not_finite_makes_its_block_nan(bad: float) -> None:
    values = torch.randn(2 * 4096)
    values[4096 + 7] = bad
    for codec, size in ((Int2Codec(), BLOCK), (Int2Codec(compiled=False), BLOCK)):
        payload = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8)
        codec.encode(values, payload)
        decoded = decode_all(codec, payload, torch.empty_like(values))
        assert decoded[4096 : 4096 + size].isnan().all()
        assert decoded[:4096].isfinite().all()
        assert decoded[4096 + size :].isfinite().all()
    payload = torch.empty(TopKCodec().num_bytes(len(values)), dtype=torch.uint8)
    TopKCodec().encode(values, payload)
    decoded = decode_all(TopKCodec(), payload, torch.empty_like(values))
    assert int(decoded[4096:].isnan().sum()) == TopKCodec().keep, "all that are sent of its chunk"
    assert decoded[:4096].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"chunk": 3000}, ValueError, "`chunk=3000` must be a power of two from 256 to 4096"),
        ({"chunk": 8192}, ValueError, "`chunk=8192` must be a power of two from 256 to 4096"),
        ({"chunk": 128}, ValueError, "`chunk=128` must be at least 256"),
        ({"keep": 0}, ValueError, "`keep=0` must be at least 1"),
        ({"keep": 257}, ValueError, "`keep=257` exceeds 256"),
        ({"keep": 0.5}, TypeError, "`keep=0.5` must be an integer"),
        ({"error_feedback": 0.0}, ValueError, "`error_feedback=0.0` must be above 0"),
        ({"error_feedback": 1.5}, ValueError, "`error_feedback=1.5` must be above 0"),
    ],
)
def test_settings_out_of_range(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TopKCodec(**settings)
