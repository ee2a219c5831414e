"""The compiled loops against the torch operations, bit for bit, and what is done without numba."""

from __future__ import annotations

import builtins
import logging
import math
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_commfree.comm.bits import packed_size
from lightning_commfree.comm.compiled import compiled, load_loops
from lightning_commfree.diloco import codec, quantize_numba
from lightning_commfree.diloco.codec import (
    BLOCK,
    Fp4Codec,
    Int2Codec,
    Int8Codec,
    decode_all,
    num_blocks,
)

CPU = torch.device("cpu")
PAIRS = {
    "int8": (Int8Codec(), Int8Codec(compiled=False)),
    "fp4": (Fp4Codec(), Fp4Codec(compiled=False)),
    "int2": (Int2Codec(), Int2Codec(compiled=False)),
}
NUMELS = [
    0,
    1,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK - 1,
    5 * BLOCK + 7,
]
GUARD = 0xA5


def kinds(numel: int) -> dict[str, Tensor]:
    """Values of one magnitude, of many within a block, of others in every block, and any bits, of
    which nearly every block has a NaN, and any that are finite."""
    values = torch.randn(numel)
    block = torch.arange(numel) // BLOCK
    words = torch.randint(-(2**31), 2**31 - 1, (numel,)).to(torch.int32)
    exponents = torch.randint(246, (numel,), dtype=torch.int32)
    finite = words & ~(0xFF << 23) | exponents << 23
    return {
        "alike": values,
        "apart": values * torch.exp(3 * torch.randn(numel)),
        "by block": torch.ldexp(values, 37 * (block % 7) - 130),
        "zeros": values * (torch.rand(numel) < 0.3),
        "any bits": words.view(torch.float32),
        "finite": finite.view(torch.float32),
    }


def through(name: str, values: Tensor) -> Tensor:
    found, _ = payloads(name, values)
    return decode_all(PAIRS[name][0], found, torch.empty_like(values))


def payloads(name: str, values: Tensor) -> tuple[Tensor, Tensor]:
    compiled, plain = PAIRS[name]
    found = torch.full((compiled.num_bytes(values.numel()),), GUARD, dtype=torch.uint8)
    expected = torch.full_like(found, 0x5A)
    compiled.encode(values, out=found)
    plain.encode(values, out=expected)
    return found, expected


def parts(name: str, values: Tensor, payload: Tensor) -> list[Tensor]:
    """Take a payload apart: scales, what is padding, and the codes, 0 for those of NaN blocks."""
    numel = values.numel()
    if name == "int8":
        scales = payload[: 4 * num_blocks(numel)].view(torch.float32)
        codes = payload[4 * num_blocks(numel) :]
        padding = codes[:0]
        nan = scales.isnan()
        scales = scales.masked_fill(nan, 0.0).view(torch.int32)
    elif name == "int2":
        scales, packed = payload.split([2 * num_blocks(numel), packed_size(numel, 2)])
        rows = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)])
        codes, padding = rows[:numel], rows[numel:]
        nan = scales.view(torch.bfloat16).isnan()
        scales = scales.view(torch.bfloat16).masked_fill(nan, 0.0).view(torch.int16)
    else:
        packed, scales = payload.split([packed_size(numel, 4), num_blocks(numel)])
        rows = torch.cat([packed & 15, packed >> 4])
        codes, padding = rows[:numel], rows[numel:]
        nan = scales == 255
    return [scales, nan, padding, codes.masked_fill(nan.repeat_interleave(BLOCK)[:numel], 0)]


def check(name: str, values: Tensor) -> None:
    """Payloads are alike but for codes of NaN blocks; values are, whoever encoded and decodes."""
    found, expected = payloads(name, values)
    for part, other in zip(parts(name, values, found), parts(name, values, expected), strict=True):
        assert torch.equal(part, other)
    decoded = [
        decode_all(reader, payload, torch.full_like(values, math.pi)).view(torch.int32)
        for payload in (found, expected)
        for reader in PAIRS[name]
    ]
    if name != "fp4":  # whose NaN is a product: its payload is the processor's affair
        decoded = [d.masked_fill(d.view(torch.float32).isnan(), 0x7FC0_0000) for d in decoded]
    for other in decoded[1:]:
        assert torch.equal(other, decoded[0])


def test_on_a_cpu_it_is_the_compiled_loops_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the comparisons below would compare the torch operations with themselves."""
    called = []
    for name in ("encode_e3m0", "decode_e3m0", "encode_int8", "encode_int2", "decode_int2"):
        monkeypatch.setattr(quantize_numba, name, lambda *_, name=name: called.append(name))
    for looped, plain in PAIRS.values():
        codec.warm_up(looped, CPU)
        codec.warm_up(plain, CPU)
    assert called == ["encode_int8", "encode_e3m0", "decode_e3m0", "encode_int2", "decode_int2"]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("name", PAIRS)
def test_loops_and_torch_operations_agree_to_the_bit(name: str, numel: int) -> None:
    for values in kinds(numel).values():
        check(name, values)


@pytest.mark.parametrize("name", PAIRS)
def test_they_agree_on_millions_of_values(name: str) -> None:
    """Among so many, some lie on an edge: a product of int8 that rounds to n + 1/2, say."""
    for values in kinds(2**21 + 777).values():
        check(name, values)


@pytest.mark.parametrize("name", PAIRS)
def test_they_agree_where_the_rules_change(name: str) -> None:
    """Ties, the ends of the range of a block, and the largest magnitudes that are 0 or NaN."""
    edges = [s * 2.0**k * m for k in range(-9, 3) for m in (1, 1.5, 1.25) for s in (1, -1)]
    around = torch.tensor(edges)
    around = torch.cat([around.nextafter(torch.tensor(far)) for far in (-9.0, 9.0)] + [around])
    for exponent in (0, -110, -118, -119, -126, -140, 100, 117, 118, 119, 120):
        check(name, torch.ldexp(around, torch.tensor(exponent)))
    # alone, so that each is the largest of its block: 2^-118 and what rounds to it, and 2^120
    last = [2.0**-118, 1.5 * 2.0**-119, 1.5 * 2.0**119]
    last += [torch.tensor(one).nextafter(torch.tensor(0.0)).item() for one in last]
    for one in (*last, math.inf, -math.inf, math.nan, -0.0, 2.0**-149, 3.4e38):
        check(name, torch.tensor([1.0, one, -2.0]))
        check(name, torch.tensor([one]))


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=BLOCK + 9))
def test_they_agree_on_what_hypothesis_finds(numbers: list[float]) -> None:
    for name in PAIRS:
        check(name, torch.tensor(numbers, dtype=torch.float32))


@pytest.fixture
def not_asked_yet() -> Iterator[None]:
    load_loops.cache_clear()
    yield
    load_loops.cache_clear()


@pytest.mark.parametrize(
    ("error", "level", "text"),
    [
        (
            ModuleNotFoundError("No module named 'numba'", name="numba"),
            "INFO",
            "numba is not installed (pip install numba): int8, fp4 and int2",
        ),
        (
            ImportError("Numba needs NumPy 2.3 or less."),
            "WARNING",
            "numba cannot be used (ImportError: Numba needs NumPy 2.3 or less.): int8",
        ),
        (
            OSError("libllvmlite.so"),
            "WARNING",
            "numba cannot be used (OSError: libllvmlite.so): int8",
        ),
        (
            ModuleNotFoundError("No module named 'llvmlite'", name="llvmlite"),
            "WARNING",
            "numba cannot be used (ModuleNotFoundError: No module named 'llvmlite'): int8",
        ),
    ],
)
@pytest.mark.usefixtures("not_asked_yet")
def test_without_numba_torch_operations_do_and_a_log_says_so(
    error: Exception,
    level: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    true_import = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name == "numba":
            raise error
        return true_import(name, *args, **kwargs)

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.delitem(sys.modules, quantize_numba.__name__)
        patch.delattr("lightning_commfree.diloco.quantize_numba")
        patch.setattr(builtins, "__import__", refusing)
        values = torch.randn(1000)
        assert torch.equal(through("fp4", values), through("fp4", values))
    assert codec._loops(CPU) is None, "what was found once stays"
    [record] = caplog.records
    assert (record.levelname, record.message[: len(text)]) == (level, text)


@pytest.mark.usefixtures("not_asked_yet")
def test_a_damaged_cache_is_warned_of_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As numba meets it: at the first call of a loop, not at the import."""
    monkeypatch.setattr(quantize_numba, "_decode_e3m0", lambda *_: pickle.loads(b""))
    check("fp4", torch.randn(1000))
    [record] = caplog.records
    assert record.message.startswith("numba cannot be used (EOFError: Ran out of input)")
    assert "If its cache in " in record.message


@pytest.mark.usefixtures("not_asked_yet")
def test_loops_that_are_not_compiled_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The interpreter would take minutes for a fragment."""
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert codec._loops(CPU) is None
    assert "NUMBA_DISABLE_JIT is set" in caplog.records[0].message


def test_where_nothing_can_be_kept_it_compiles_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses where neither the package's folder nor the user's can be written to."""
    true_njit = numba.njit

    def homeless(*args: Any, cache: bool = False, **kwargs: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return true_njit(*args, **kwargs)

    monkeypatch.setattr(numba, "njit", homeless)

    def double(number: int) -> int:
        return 2 * number

    assert compiled(double)(21) == 42
