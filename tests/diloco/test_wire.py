"""Every wire format: the size of a payload, a round trip, and what the docstring promises."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.diloco.codec import (
    BLOCK,
    CODECS,
    Codec,
    Fp4Codec,
    Int2Codec,
    Int8Codec,
    decode_all,
)
from lightning_commfree.diloco.exchange import FragmentMessage, Header

FORMATS: dict[str, Codec] = {
    **CODECS,  # int8, fp4 and int2 in compiled loops, as long as all is on a CPU
    "int8 in torch operations": Int8Codec(compiled=False),
    "fp4 in torch operations": Fp4Codec(compiled=False),
    "int2 in torch operations": Int2Codec(compiled=False),
}
NAMES = list(FORMATS)
BY_BLOCKS = [name for name in NAMES if name.startswith(("int8", "fp4", "int2"))]
ODD_NUMELS = [0, 1, 2, 3, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7]
GUARD = 0xA5


def payload_of(name: str, values: Tensor) -> Tensor:
    wire = FORMATS[name]
    payload = torch.full((wire.num_bytes(values.numel()),), GUARD, dtype=torch.uint8)
    wire.encode(values, out=payload)
    return payload


def through_the_wire(name: str, values: Tensor) -> Tensor:
    return decode_all(FORMATS[name], payload_of(name, values), torch.empty(values.numel()))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32.0),
        ("bf16", 16.0),
        ("int8", 8.125),
        ("fp4", 4.03125),
        ("int2", 2.0625),
    ],
)
def test_bits_a_value_are_those_of_the_table(name: str, bits: float) -> None:
    numel = 1024 * BLOCK
    assert 8 * FORMATS[name].num_bytes(numel) / numel == bits


@pytest.mark.parametrize("numel", ODD_NUMELS)
@pytest.mark.parametrize("name", NAMES)
def test_encode_fills_the_payload_and_nothing_else(name: str, numel: int) -> None:
    """Written into the middle of a larger buffer, once over zeros and once over ones.

    The payload must not depend on what was there before, and its neighbours must stay.
    """
    values = torch.randn(numel)
    wire = FORMATS[name]
    size = wire.num_bytes(numel)
    payloads = []
    for before in (0x00, 0xFF):
        buffer = torch.full((8 + size + 8,), GUARD, dtype=torch.uint8)
        payload = buffer[8:][:size]
        payload.fill_(before)
        wire.encode(values, out=payload)
        assert buffer[:8].tolist() == buffer[8 + size :].tolist() == [GUARD] * 8
        payloads.append(payload.clone())
    assert torch.equal(payloads[0], payloads[1])


@pytest.mark.parametrize("numel", ODD_NUMELS)
@pytest.mark.parametrize("name", NAMES)
def test_decode_gives_fp32_of_the_same_length_and_is_a_fixed_point(name: str, numel: int) -> None:
    """What has been on the wire once goes over it again unchanged, up to rounded scales."""
    values = torch.randn(numel)
    decoded = through_the_wire(name, values)
    assert (decoded.dtype, decoded.shape) == (torch.float32, values.shape)
    again = through_the_wire(name, decoded)
    tolerances = {"int8": 1e-6, "int2": 0.02}
    rtol = tolerances.get(name.split()[0], 0.0)
    torch.testing.assert_close(again, decoded, rtol=rtol, atol=0.0)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=300))
def test_fp32_is_exact_bit_for_bit(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    decoded = through_the_wire("fp32", values)
    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=300))
def test_bf16_rounds_to_nearest_even(numbers: list[float]) -> None:
    """On the bits: add half of what is cut off, and one more where the last kept bit is 1."""
    values = torch.tensor(numbers, dtype=torch.float32)
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFF_FFFF
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    expected = torch.where(rounded >= 1 << 31, rounded - (1 << 32), rounded).to(torch.int32)
    assert torch.equal(through_the_wire("bf16", values).view(torch.int32), expected)


def test_bf16_ties_and_what_is_not_finite() -> None:
    tie_down, tie_up = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # halfway between neighbours 2^-7 apart
    values = torch.tensor([tie_down, tie_up, math.inf, -math.inf, math.nan])
    decoded = through_the_wire("bf16", values)
    assert decoded[:4].tolist() == [1.0, 1 + 2.0**-6, math.inf, -math.inf]
    assert decoded[4].isnan()


@pytest.mark.parametrize("numel", ODD_NUMELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_that_part_of_the_whole_and_nothing_else(name: str, numel: int) -> None:
    """Of one block or more, and with neighbours that have to stay."""
    values = torch.randn(numel) * 10.0 ** (torch.arange(numel) // BLOCK)
    payload, whole = payload_of(name, values), through_the_wire(name, values)
    first, last = slice(0, numel // BLOCK * BLOCK), slice(numel // BLOCK * BLOCK, numel)
    parts = [slice(i, i + BLOCK) for i in range(0, first.stop, BLOCK)] + [first, last]
    for part in parts:
        if part.start == part.stop:
            continue
        out = torch.full((3 + part.stop - part.start + 3,), math.pi)
        FORMATS[name].decode(payload, numel, part, out[3:-3])
        assert torch.equal(out[3:-3], whole[part])
        assert (torch.cat([out[:3], out[-3:]]) == torch.tensor(math.pi)).all()


def test_threads_do_not_share_a_workspace() -> None:
    """The training thread encodes one fragment while the thread beside it decodes another."""
    tensors = [torch.randn(300 * BLOCK + 5) for _ in range(4)]
    jobs = [(name, values) for name in BY_BLOCKS for values in tensors] * 8
    alone = [through_the_wire(*job) for job in jobs]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda job: through_the_wire(*job), jobs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_threads_buffers_work_in_and_out_of_inference_mode() -> None:
    values = torch.randn(3 * BLOCK + 5)

    def in_a_new_thread() -> list[Tensor]:
        with torch.inference_mode():
            inside = [through_the_wire(name, values) for name in NAMES]
        return inside + [through_the_wire(name, values) for name in NAMES]

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(in_a_new_thread).result()
    for a, b in zip(found[: len(NAMES)], found[len(NAMES) :], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_a_precision_plugin_may_change_the_default_dtype_at_any_time(
    name: str, default: torch.dtype
) -> None:
    """Lightning's bf16-true does so around every training step, while a thread decodes."""
    wire, values = FORMATS[name], torch.randn(3 * BLOCK + 5)
    layout = FragmentMessage(wire, values.numel(), num_buffers=2)
    exact, header = torch.tensor([1.0, 3.0000002]), Header(requests=0, step=1, digest=0)

    def played() -> list[Tensor]:
        messages = torch.empty(2, layout.num_bytes, dtype=torch.uint8)
        for message, sent in zip(messages, (values, 2.3 * values), strict=True):
            layout.write(message, header, sent, exact)
        mean, norms = layout.average(messages, [1, 1])
        buffers = layout.average_buffers(messages, [1, 1])
        return [messages, layout.values(messages), mean, norms, buffers]

    expected = played()
    with ThreadPoolExecutor(1) as thread:  # which has no workspace yet
        torch.set_default_dtype(default)
        try:
            found = thread.submit(played).result()
        finally:
            torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_makes_the_same_payload_and_values_and_never_waits(name: str) -> None:
    wire, values = FORMATS[name], torch.randn(1000 * BLOCK + 7)
    expected = payload_of(name, values)
    on_gpu, payload = values.cuda(), expected.cuda().zero_()
    decoded = torch.ones_like(on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        wire.encode(on_gpu, out=payload)
        decode_all(wire, payload, decoded)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(payload.cpu(), expected)
    assert torch.equal(decoded.cpu(), through_the_wire(name, values))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_forms_the_same_mean(name: str) -> None:
    rows = [torch.randn(1000 * BLOCK + 7) for _ in range(3)]
    layout = FragmentMessage(FORMATS[name], rows[0].numel(), num_buffers=1)
    exact, header = torch.ones(1), Header(requests=0, step=1, digest=0)
    messages = torch.empty(len(rows), layout.num_bytes, dtype=torch.uint8)
    for message, row in zip(messages, rows, strict=True):
        layout.write(message, header, row, exact)
    mean, norms = layout.average(messages, [1] * 3)
    mean_there, norms_there = layout.average(messages.cuda(), [1] * 3)
    assert torch.equal(mean_there.cpu(), mean)
    torch.testing.assert_close(norms_there.cpu(), norms)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("fp32", 0.0),
        ("bf16", 2.0**-8),
        ("int8", 0.02),
        ("fp4", 0.22),
        ("int2", 0.36),
    ],
)
def test_relative_rms_error_grows_as_the_bits_fall(name: str, limit: float) -> None:
    values = torch.randn(64 * BLOCK)
    error = float((through_the_wire(name, values) - values).norm() / values.norm())
    assert limit / 4 <= error <= limit
