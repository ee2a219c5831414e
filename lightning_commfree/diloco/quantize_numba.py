"""Compiled CPU loops for fp4, int8 and int2, bit-identical to `quantize`.

`quantize` makes one pass over the values per arithmetic operation. These loops keep a block
in registers and the L1 cache, so encoding and decoding run at memory speed. Payloads are the same
except for the codes of NaN blocks, which are garbage, so replicas with and without numba can train
together.

The loops release the GIL and use one thread. They take constants from other files as arguments (see
`comm.compiled`). Every operation is wrapped in `i32`, because numba would otherwise use 64 bits,
which halves the number of values per register.
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
_HALF = i32(1 << 22)  # half of the mantissa's range
_MAGNITUDE = i32(0x7FFF_FFFF)
_INF = i32(0x7F80_0000)
_NAN = i32(0x7FC0_0000)
_TOP_OF_NAN = i32(255)
_LIMIT = f32(127.0)


def encode_e3m0(values: Tensor, packed: Tensor, scales: Tensor, block_size: int) -> None:
    """Encode values like `quantize.encode_e3m0`, and pack the codes like `bits.pack_codes_part`.

    `values` are fp32, shape (N,), contiguous; `packed` (uint8, shape (packed_size(N, 4),)) and
    `scales` (uint8, one per block) receive the results.
    """
    bits = values.view(torch.int32).numpy()
    _encode_e3m0(bits, packed.numpy(), scales.numpy(), block_size, MIN_TOP, MAX_TOP)


def decode_e3m0(packed: Tensor, start: int, scales: Tensor, out: Tensor, block_size: int) -> None:
    """Decode a chunk of n values, from index `start`, into `out` (fp32, shape (n,)).

    `packed` contains the codes of all values, `scales` those of the chunk's blocks.
    """
    tops, bits = scales.numpy(), out.view(torch.int32).numpy()
    _decode_e3m0(packed.numpy(), start, tops, bits, block_size, MIN_TOP, MAX_TOP)


def encode_int8(values: Tensor, codes: Tensor, scales: Tensor, block_size: int) -> None:
    """Encode values like `quantize.encode_int8`, except that the codes of a NaN block are 0."""
    bits, least = values.view(torch.int32).numpy(), f32(MIN_LARGEST)
    _encode_int8(bits, values.numpy(), codes.numpy(), scales.numpy(), block_size, least)


def encode_int2(values: Tensor, packed: Tensor, scales: Tensor, block_size: int) -> None:
    """Encode values like `quantize.encode_int2`, and pack the codes.

    As in `encode_e3m0`, but `packed` has shape (packed_size(N, 2),), `scales` are bf16, and
    `block_size` is at most 256.
    """
    bits, halves = values.view(torch.int32).numpy(), scales.view(torch.int16).numpy()
    _encode_int2(bits, values.numpy(), packed.numpy(), halves, block_size, MIN_TOP, MAX_TOP)


def decode_int2(packed: Tensor, start: int, scales: Tensor, out: Tensor, block_size: int) -> None:
    """Decode a chunk encoded by `encode_int2`; arguments are as in `decode_e3m0`."""
    _decode_int2(packed.numpy(), start, scales.float().numpy(), out.numpy(), block_size)


def try_out() -> None:
    """Run every loop once, so that numba compiles it or loads it from its cache."""
    value, word = torch.zeros(1, dtype=torch.float32), torch.zeros(8, dtype=torch.uint8)
    encode_e3m0(value, word, word[:1].clone(), 1)
    decode_e3m0(word, 0, word[:1], value, 1)
    encode_int8(value, word[:1].view(torch.int8), value.clone(), 1)
    scale = torch.zeros(1, dtype=torch.bfloat16)
    encode_int2(value, word, scale, 1)
    decode_int2(word, 0, scale, value, 1)


@compiled
def _largest(bits: Any) -> Any:
    """Return the bit pattern of the largest magnitude; NaN counts as larger than Inf."""
    top = i32(0)
    for i in range(bits.size):
        magnitude = i32(bits[i] & _MAGNITUDE)
        top = magnitude if magnitude > top else top
    return top


@compiled
def _write_e3m0_codes(bits: Any, floor: Any, codes: Any) -> None:
    """Write the E3M0 codes of a block; `floor` is 2^(E-7) as fp32 bits."""
    for i in range(bits.size):
        value = i32(bits[i])
        # adding half of the mantissa's range carries into the exponent at 1.5 * 2^k, which gives m;
        # below 2^(E-6), where m would be 0, the code is 1 for magnitudes of at least the floor
        above = i32(i32(value & _MAGNITUDE) - floor)
        by_exponent = i32(i32(above + _HALF) >> _SHIFT)
        from_floor_on = i32(i32(1) + i32(above >> i32(31)))

        code = by_exponent if by_exponent > from_floor_on else from_floor_on
        codes[i] = u8(i32(code | i32(i32(value >> i32(28)) & i32(8))))


@compiled
def _write_low(codes: Any, packed: Any) -> None:
    """Write 4-bit codes to the low half of bytes, and clear the high half."""
    for i in range(codes.size):
        packed[i] = codes[i]


@compiled
def _write_high(codes: Any, packed: Any) -> None:
    """Add 4-bit codes to the high half of bytes whose low half is written already."""
    for i in range(codes.size):
        packed[i] = u8(packed[i] | u8(codes[i] << u8(4)))


@compiled
def _encode_e3m0(
    bits: Any, packed: Any, scales: Any, block_size: Any, lowest: Any, highest: Any
) -> None:
    """Write packed codes and one scale per block of the values, given as fp32 `bits`.

    A block is zero if its biased exponent is below `lowest`, and NaN if above `highest`.
    """
    row = packed.size  # byte i contains code i (low half) and code row + i (high half)
    packed[bits.size :] = u8(0)  # padding, if there are fewer values than bytes
    codes_of_block = np.empty(block_size, u8)

    for b in range(scales.size):
        start = b * block_size
        stop = min(start + block_size, bits.size)
        block, codes = bits[start:stop], codes_of_block[: stop - start]

        top = i32(i32(min(_largest(block), _INF) + _HALF) >> _SHIFT)
        floor = i32(i32(top - i32(7)) << _SHIFT)
        if top < lowest:
            top, floor = i32(0), _INF  # no value reaches this floor: all codes are 0
        elif top > highest:
            top = _TOP_OF_NAN

        scales[b] = u8(top)
        _write_e3m0_codes(block, floor, codes)

        low = min(max(row - start, 0), stop - start)
        _write_low(codes[:low], packed[start : start + low])
        if start + low < stop:
            _write_high(codes[low:], packed[start + low - row : stop - row])


@compiled
def _write_powers(packed: Any, shift: Any, base: Any, mask: Any, bits: Any) -> None:
    """Decode E3M0 codes to fp32 bits: the sign, and magnitude 2^(E-7+m), or 0 if m is 0.

    `base` is the biased exponent of 2^(E-7). `mask` is -1, or 0 to set all magnitudes to 0.
    """
    for i in range(packed.size):
        code = i32(i32(packed[i]) >> shift)
        m = i32(code & i32(7))

        power = i32(i32(m + base) << _SHIFT)
        magnitude = i32(power & mask) if m > i32(0) else i32(0)
        bits[i] = i32(magnitude | i32(i32(code & i32(8)) << i32(28)))


@compiled
def _decode_e3m0(
    packed: Any, first: Any, scales: Any, bits: Any, block_size: Any, lowest: Any, highest: Any
) -> None:
    """Write the fp32 bits of the codes from index `first` on; there is one scale per block."""
    row = packed.size
    for b in range(scales.size):
        start = b * block_size
        stop = min(start + block_size, bits.size)
        top = i32(scales[b])
        if top > highest:
            bits[start:stop] = _NAN
            continue

        base, mask = i32(top - i32(7)), i32(-1) if top >= lowest else i32(0)

        low = min(max(row - first - start, 0), stop - start)
        at = first + start
        _write_powers(packed[at : at + low], i32(0), base, mask, bits[start : start + low])

        if start + low < stop:
            at += low - row
            high = packed[at : at + stop - start - low]
            _write_powers(high, i32(4), base, mask, bits[start + low : stop])


@compiled
def _write_int8_codes(values: Any, factor: Any, codes: Any) -> None:
    """Write `values * factor`, rounded; the caller's factor keeps them within int8."""
    for i in range(values.size):
        codes[i] = np.int8(np.rint(f32(values[i] * factor)))


@compiled
def _encode_int8(
    bits: Any, values: Any, codes: Any, scales: Any, block_size: Any, least: Any
) -> None:
    """Write codes and one scale per block; a block whose largest is below `least` becomes 0."""
    one = np.empty(1, i32)

    for b in range(scales.size):
        block = slice(b * block_size, min(b * block_size + block_size, bits.size))
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
            _write_int8_codes(values[block], f32(f32(f32(1) / largest) * _LIMIT), codes[block])


@compiled
def _fit_two_bits(values: Any, factor: Any, units: Any, codes: Any) -> Any:
    """Write a block's levels (0: low, 1: high) to `codes`; return the scale times `factor`."""
    # `units` is scratch memory, int32, one per value
    total = square = i32(0)
    for i in range(values.size):
        unit = i32(np.rint(f32(abs(values[i]) * factor)))
        units[i] = unit
        total = i32(total + unit)
        square = i32(square + i32(unit * unit))
    limit = f32(f32(square) / f32(values.size))

    high = high_total = i32(0)
    for i in range(values.size):
        above = i32(1) if f32(i32(units[i] * units[i])) > limit else i32(0)
        codes[i] = u8(above)
        high = i32(high + above)
        high_total = i32(high_total + i32(above * units[i]))
    product = i32(total + i32(i32(2) * high_total))
    return f32(f32(product) / f32(i32(i32(values.size) + i32(i32(8) * high))))


@compiled
def _write_signs(bits: Any, codes: Any) -> None:
    """Fold signs into two-bit codes: 0 and 1 become 2 and 3, or 1 and 0 for negative values."""
    for i in range(bits.size):
        code = i32(i32(2) + i32(codes[i]))
        codes[i] = u8(i32(code ^ i32(i32(bits[i] >> i32(31)) & i32(3))))


@compiled
def _encode_int2(
    bits: Any, values: Any, packed: Any, scales: Any, block_size: Any, lowest: Any, highest: Any
) -> None:
    """Write packed codes and one bf16 scale, as bits, per block; see `_encode_e3m0`."""
    row = packed.size  # byte i contains the codes i, row + i, 2 row + i and 3 row + i
    packed[bits.size :] = u8(0)  # padding, if there are fewer values than bytes
    codes_of_block, units = np.empty(block_size, u8), np.empty(block_size, i32)
    word = np.empty(1, i32)

    for b in range(scales.size):
        start = b * block_size
        stop = min(start + block_size, bits.size)
        block, codes = bits[start:stop], codes_of_block[: stop - start]

        top = i32(_largest(block) >> _SHIFT)
        if top < lowest or top > highest:
            codes[:] = u8(0)
            scales[b] = np.int16(0 if top < lowest else 0x7FC0)
        else:
            word[0] = i32(i32(i32(261) - top) << _SHIFT)  # 2^8 / the power of two above the largest
            fitted = _fit_two_bits(values[start:stop], word.view(f32)[0], units, codes)
            word[0] = i32(i32(top - i32(7)) << _SHIFT)
            word.view(f32)[0] = f32(fitted * word.view(f32)[0])
            # round to bf16, ties to even
            lowest_kept = i32(i32(word[0] >> i32(16)) & i32(1))
            scales[b] = np.int16(i32(i32(word[0] + i32(0x7FFF)) + lowest_kept) >> i32(16))
        _write_signs(block, codes)

        position = start
        while position < stop:
            shift, byte = position // row, position % row
            count = min(row - byte, stop - position)
            part = codes[position - start : position - start + count]
            if shift == 0:
                _write_low(part, packed[byte : byte + count])
            else:
                _or_shifted(part, u8(2 * shift), packed[byte : byte + count])
            position += count


@compiled
def _or_shifted(codes: Any, shift: Any, packed: Any) -> None:
    """Add codes, shifted left by `shift` bits, to bytes in which these bits are zero."""
    for i in range(codes.size):
        packed[i] = u8(packed[i] | u8(codes[i] << shift))


@compiled
def _write_levels(packed: Any, shift: Any, scale: Any, out: Any) -> None:
    """Decode the two-bit codes at bit `shift` of each byte, with one scale, into `out`."""
    for i in range(packed.size):
        code = i32(i32(i32(packed[i]) >> shift) & i32(3))
        out[i] = f32(f32(f32(code) - f32(1.5)) * f32(f32(2.0) * scale))


@compiled
def _decode_int2(packed: Any, first: Any, scales: Any, out: Any, block_size: Any) -> None:
    """Decode the codes from index `first` on, with one scale per block, into `out`."""
    row = packed.size
    for b in range(scales.size):
        position, stop = b * block_size, min(b * block_size + block_size, out.size)
        while position < stop:
            shift, byte = (first + position) // row, (first + position) % row
            count = min(row - byte, stop - position)
            part = packed[byte : byte + count]
            _write_levels(part, i32(2 * shift), scales[b], out[position : position + count])
            position += count
