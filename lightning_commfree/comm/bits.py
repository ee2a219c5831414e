"""Pack small codes into bytes: eight 1-bit flags, four 2-bit or two 4-bit codes per byte.

The layout is *planar*: N codes are padded with zeros and divided into equal rows, as many as there
are codes in a byte; byte j contains code j of every row. Packing a row is one addition on
consecutive bytes, unpacking it one shift and one mask. With R packed bytes:

======== ====== ================= =================================================================
code     rows   packed bytes R    position of code i
======== ====== ================= =================================================================
1 bit    8      8 ceil(N / 64)    byte i % R, bit i // R, where bit 0 is the least significant one
2 bits   4      8 ceil(N / 32)    byte i % R, bits 2 (i // R) and 2 (i // R) + 1
4 bits   2      8 ceil(N / 16)    byte i % R, low nibble if i < R, else high nibble
======== ====== ================= =================================================================

A packed buffer is a whole number of 8-byte words, so bitwise operations can run on its
`view(torch.int64)`, 64 flags per word, on machines of any byte order. The buffer does not store N.
To split packed flags among n ranks, first pad them to a multiple of 64 n, so that each rank gets
whole words.

Codes are packed and unpacked in chunks that fit into a CPU's cache; the unpacked codes of a whole
buffer are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_WORD_BYTES = 8


def packed_size(numel: int, bits: int) -> int:
    """Return the size in bytes of `numel` packed codes of `bits` bits, a multiple of 8."""
    return -(-numel * bits // (8 * _WORD_BYTES)) * _WORD_BYTES


def pack_bits_part(flags: Tensor, start: int, packed: Tensor) -> None:
    """Write consecutive flags into a packed buffer.

    Parts must be written in ascending order, because each adds its bits to bytes already written.

    Args:
        flags: bool, shape (..., n).
        start: index of the first flag.
        packed: uint8, shape (..., R), where R is 8 ceil(N / 64) or more, in whole words. Zero it
            before the first part; flags that are never written are then False.
    """
    pack_codes_part(flags.view(torch.uint8), 1, start, packed)


def unpack_bits_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Read flags `start` to `start` + n from `packed`, shape (..., R), as 0 and 1.

    `out` is uint8, shape (..., n).
    """
    unpack_codes_part(packed, 1, start, out)


def pack_codes_part(codes: Tensor, bits: int, start: int, packed: Tensor) -> None:
    """Write consecutive codes into a packed buffer.

    Call it for adjacent parts in ascending order, until the buffer is complete: the first row
    overwrites the buffer's previous contents, and the others are added to it.

    Args:
        codes: uint8, shape (..., n), values below 2^bits; unchecked, because a check would
            synchronize a GPU.
        bits: 1, 2 or 4.
        start: index of the first code.
        packed: uint8, shape (..., packed_size(N, bits)).
    """
    # Only in a buffer of a single word can the first row be longer than the codes.
    if packed.shape[-1] == _WORD_BYTES and start == 0:
        packed.zero_()
    for row, position, part in _positions(start, codes.shape[-1], packed.shape[-1]):
        if row == 0:
            packed[..., position].copy_(codes[..., part])
        else:  # rows use different bits, so adding is OR-ing, and `alpha` shifts in the same pass
            packed[..., position].add_(codes[..., part], alpha=1 << bits * row)


def unpack_codes_part(packed: Tensor, bits: int, start: int, out: Tensor) -> None:
    """Read the codes `start` to `start` + n of a packed buffer into `out`, uint8, (..., n)."""
    for row, position, part in _positions(start, out.shape[-1], packed.shape[-1]):
        torch.bitwise_right_shift(packed[..., position], bits * row, out=out[..., part])
    out.bitwise_and_((1 << bits) - 1)


def lift_nibbles_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Read 4-bit codes into the upper bits of 16-bit words.

    A decoder to floating point shifts and masks the words anyway, so isolating the codes here would
    cost an extra pass.

    Args:
        packed: uint8, shape (packed_size(N, 4),).
        start: index of the first code to read.
        out: int16, shape (n,). Bits 12 to 15 of word i become code `start` + i; the lower bits are
            garbage.
    """
    for row, position, part in _positions(start, out.numel(), packed.numel()):
        out[part].copy_(packed[position]).bitwise_left_shift_(8 if row else 12)


def _positions(start: int, numel: int, row_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (row, bytes, codes) for each row with any of the codes `start` to `start` + `numel`."""
    position, stop = start, start + numel
    while position < stop:
        row, byte = divmod(position, row_bytes)
        count = min(row_bytes - byte, stop - position)
        code = position - start
        yield row, slice(byte, byte + count), slice(code, code + count)
        position += count
