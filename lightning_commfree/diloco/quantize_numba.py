"""Compiled CPU loops for fp4 and int8, bit-identical to `quantize`.

`quantize` makes one pass over the values per arithmetic operation. These loops keep a block
in registers and the L1 cache, so encoding and decoding run at memory speed. Payloads are the same
except for the codes of NaN blocks, which are garbage, so replicas with and without numba can train
together.

The loops take constants of other files as arguments (see `comm.compiled`).

The loops release the GIL and use one thread. Every operation is wrapped in `i32`, because numba
would otherwise use 64 bits, which halves the number of values per register.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_commfree.comm.compiled import compiled
from lightning_commfree.diloco.quantize import MAX_TOP, MIN_LARGEST, MIN_TOP

i32, u8, f32 = np.int32, np.uint8, np.float32
_SHIFT = i32(23)  # bits of an fp32's mantissa
_HALF = i32(1 << 22)  # of the mantissa's range
_MAGNITUDE = i32(0x7FFF_FFFF)
_INF = i32(0x7F80_0000)
_NAN = i32(0x7FC0_0000)
_TOP_OF_NAN = i32(255)
_LIMIT = f32(127.0)


def encode_e3m0(values: Tensor, packed: Tensor, scales: Tensor, block: int) -> None:
    """Encode like `quantize.encode_e3m0` and pack like `bits.pack_nibbles_part`.

    Args:
        values: fp32, shape (N,), contiguous.
        packed: uint8, shape (packed_nibbles_size(N),), filled.
        scales: uint8, shape (num_blocks(N),), filled.
        block: number of values per block.
    """
    bits = values.view(torch.int32).numpy()
    _encode_e3m0(bits, packed.numpy(), scales.numpy(), block, MIN_TOP, MAX_TOP)


def decode_e3m0(packed: Tensor, start: int, scales: Tensor, out: Tensor, block: int) -> None:
    """Decode a chunk encoded by `encode_e3m0`.

    Args:
        packed: codes of all values.
        start: index of the chunk's first value.
        scales: scales of the chunk's blocks.
        out: fp32, shape (n,), filled.
        block: number of values per block.
    """
    tops, bits = scales.numpy(), out.view(torch.int32).numpy()
    _decode_e3m0(packed.numpy(), start, tops, bits, block, MIN_TOP, MAX_TOP)


def encode_int8(values: Tensor, codes: Tensor, scales: Tensor, block: int) -> None:
    """Encode like `quantize.encode_int8`; the codes of a NaN block are 0."""
    bits, least = values.view(torch.int32).numpy(), f32(MIN_LARGEST)
    _encode_int8(bits, values.numpy(), codes.numpy(), scales.numpy(), block, least)


def try_out() -> None:
    """Compile the loops, or load them from numba's cache."""
    value, word = torch.zeros(1, dtype=torch.float32), torch.zeros(8, dtype=torch.uint8)
    encode_e3m0(value, word, word[:1].clone(), 1)
    decode_e3m0(word, 0, word[:1], value, 1)
    encode_int8(value, word[:1].view(torch.int8), value.clone(), 1)


@compiled
def _largest(bits: Any) -> Any:
    """Return the bits of the largest magnitude; NaN counts as larger than Inf."""
    top = i32(0)
    for i in range(bits.size):
        magnitude = i32(bits[i] & _MAGNITUDE)
        top = magnitude if magnitude > top else top
    return top


@compiled
def _codes(bits: Any, floor: Any, codes: Any) -> None:
    """Write a block's codes; `floor` is 2^(E-7) as fp32 bits."""
    for i in range(bits.size):
        value = i32(bits[i])
        # adding half of a mantissa carries into the exponent at 1.5 * 2^k, which gives m; below
        # 2^(E-6), where m would be 0, the code is 1 from the floor on
        above = i32(i32(value & _MAGNITUDE) - floor)
        by_exponent = i32(i32(above + _HALF) >> _SHIFT)
        from_floor_on = i32(i32(1) + i32(above >> i32(31)))

        code = by_exponent if by_exponent > from_floor_on else from_floor_on
        codes[i] = u8(i32(code | i32(i32(value >> i32(28)) & i32(8))))


@compiled
def _write_low(codes: Any, packed: Any) -> None:
    for i in range(codes.size):
        packed[i] = codes[i]


@compiled
def _write_high(codes: Any, packed: Any) -> None:
    for i in range(codes.size):
        packed[i] = u8(packed[i] | u8(codes[i] << u8(4)))


@compiled
def _encode_e3m0(bits: Any, packed: Any, scales: Any, size: Any, lowest: Any, highest: Any) -> None:
    row = packed.size  # byte i contains code i (low half) and code row + i (high half)
    packed[bits.size :] = u8(0)  # padding, if there are fewer values than bytes
    codes_of_block = np.empty(size, u8)

    for b in range(scales.size):
        start = b * size
        stop = min(start + size, bits.size)
        block, codes = bits[start:stop], codes_of_block[: stop - start]

        top = i32(i32(min(_largest(block), _INF) + _HALF) >> _SHIFT)
        floor = i32(i32(top - i32(7)) << _SHIFT)
        if top < lowest:
            top, floor = i32(0), _INF  # no value reaches this floor: all codes are 0
        elif top > highest:
            top = _TOP_OF_NAN

        scales[b] = u8(top)
        _codes(block, floor, codes)

        low = min(max(row - start, 0), stop - start)
        _write_low(codes[:low], packed[start : start + low])
        if start + low < stop:
            _write_high(codes[low:], packed[start + low - row : stop - row])


@compiled
def _lift(packed: Any, shift: Any, base: Any, kept: Any, bits: Any) -> None:
    """Write 2^(E-7+m) as fp32 bits, with `base` = E - 7; 0 if m or `kept` is 0."""
    for i in range(packed.size):
        code = i32(i32(packed[i]) >> shift)
        m = i32(code & i32(7))

        power = i32(i32(m + base) << _SHIFT)
        magnitude = i32(power & kept) if m > i32(0) else i32(0)
        bits[i] = i32(magnitude | i32(i32(code & i32(8)) << i32(28)))


@compiled
def _decode_e3m0(
    packed: Any, first: Any, scales: Any, bits: Any, size: Any, lowest: Any, highest: Any
) -> None:
    row = packed.size
    for b in range(scales.size):
        start = b * size
        stop = min(start + size, bits.size)
        top = i32(scales[b])
        if top > highest:
            bits[start:stop] = _NAN
            continue

        base, kept = i32(top - i32(7)), i32(-1) if top >= lowest else i32(0)

        low = min(max(row - first - start, 0), stop - start)
        at = first + start
        _lift(packed[at : at + low], i32(0), base, kept, bits[start : start + low])

        if start + low < stop:
            at += low - row
            high = packed[at : at + stop - start - low]
            _lift(high, i32(4), base, kept, bits[start + low : stop])


@compiled
def _scaled(values: Any, factor: Any, codes: Any) -> None:
    for i in range(values.size):
        codes[i] = np.int8(np.rint(f32(values[i] * factor)))


@compiled
def _encode_int8(bits: Any, values: Any, codes: Any, scales: Any, size: Any, least: Any) -> None:
    one = np.empty(1, i32)

    for b in range(scales.size):
        block = slice(b * size, min(b * size + size, bits.size))
        one[0] = _largest(bits[block])
        largest = one.view(f32)[0]

        if one[0] >= _INF:
            scales[b] = f32(np.nan)
            codes[block] = np.int8(0)
        elif largest < least:
            scales[b] = f32(0)
            codes[block] = np.int8(0)
        else:
            scales[b] = f32(largest / _LIMIT)
            # two roundings, as in torch's 127 / largest
            _scaled(values[block], f32(f32(f32(1) / largest) * _LIMIT), codes[block])
