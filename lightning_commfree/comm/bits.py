"""Pack small codes into bytes: eight 1-bit flags, four 2-bit or two 4-bit codes per byte.

The layout is *planar*: N codes are padded with zeros and divided into equal rows, as many as there
are codes in a byte; byte j contains code j of every row. Packing a row takes one addition on
consecutive bytes, and unpacking it takes one shift and one mask. With R packed bytes:

======== ====== ================= =================================================================
code     rows   packed bytes R    position of code i
======== ====== ================= =================================================================
1 bit    8      8 ceil(N / 64)    byte i % R, bit i // R, where bit 0 is the least significant
2 bits   4      8 ceil(N / 32)    byte i % R, bits 2 (i // R) and 2 (i // R) + 1
4 bits   2      8 ceil(N / 16)    byte i % R, in the low nibble if i < R, else in the high nibble
======== ====== ================= =================================================================

A packed buffer is a whole number of 8-byte words, so bitwise operations can run on its
`view(torch.int64)`, 64 flags per word, on machines with any byte order. It does not store N. To
split packed flags among n ranks, first pad them to a multiple of 64 n, so that each rank gets whole
words.

Callers pack and unpack codes in chunks that fit into a CPU's cache, so the unpacked codes of a
whole buffer are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_WORD_BYTES = 8


def packed_size(numel: int, bits: int) -> int:
    """Return the size in bytes, a multiple of 8, of `numel` packed codes of `bits` bits each."""
    return -(-numel * bits // (8 * _WORD_BYTES)) * _WORD_BYTES


def pack_bits_part(flags: Tensor, start: int, packed: Tensor) -> None:
    """Pack bool flags (..., n), from index `start` of their sequence, into uint8 `packed` (..., R).

    R is at least 8 ceil(N / 64) and a multiple of 8. Zero `packed` before the first part, and pack
    the parts in ascending order, because each one adds its bits to bytes already written.
    """
    pack_codes_part(flags.view(torch.uint8), 1, start, packed)


def unpack_bits_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Unpack n 1-bit flags, starting at index `start`, into `out` as 0s and 1s.

    `packed` and `out` are uint8, shapes (..., R) and (..., n).
    """
    unpack_codes_part(packed, 1, start, out)


def pack_codes_part(codes: Tensor, bits: int, start: int, packed: Tensor) -> None:
    """Pack uint8 codes (..., n), from index `start`, into uint8 (..., packed_size(N, bits)).

    Pack adjacent parts in ascending order until the buffer is complete: the first row overwrites
    the buffer's previous contents, and the other rows are added to it. `bits` is 1, 2 or 4; codes
    must be below 2^bits, which is not checked, because a check would synchronize a GPU.
    """
    # The first row can be longer than the codes only in a buffer of a single word.
    if packed.shape[-1] == _WORD_BYTES and start == 0:
        packed.zero_()
    for row, position, part in _positions(start, codes.shape[-1], packed.shape[-1]):
        if row == 0:
            packed[..., position].copy_(codes[..., part])
        else:  # rows use different bits, so adding is OR-ing, and `alpha` shifts in the same pass
            packed[..., position].add_(codes[..., part], alpha=1 << bits * row)


def unpack_codes_part(packed: Tensor, bits: int, start: int, out: Tensor) -> None:
    """Unpack n codes, from index `start` of a buffer of `pack_codes_part`, into uint8 (..., n)."""
    for row, position, part in _positions(start, out.shape[-1], packed.shape[-1]):
        torch.bitwise_right_shift(packed[..., position], bits * row, out=out[..., part])
    out.bitwise_and_((1 << bits) - 1)


def lift_nibbles_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Unpack 4-bit codes, from index `start`, into bits 12 to 15 of the int16 words `out` (n,).

    The lower bits are not cleared: decoding to floating point shifts and masks the words anyway, so
    clearing them here would cost an extra pass. `packed` is uint8, (packed_size(N, 4),).
    """
    for row, position, part in _positions(start, out.numel(), packed.numel()):
        out[part].copy_(packed[position]).bitwise_left_shift_(8 if row else 12)


def _positions(start: int, numel: int, row_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (row, bytes, codes) for each row of a packed buffer that has codes of a range.

    The range has `numel` codes, from index `start` on. `bytes` is the slice of the buffer, and
    `codes` the slice of the range, that contain the same codes.
    """
    position, stop = start, start + numel
    while position < stop:
        row, byte = divmod(position, row_bytes)
        count = min(row_bytes - byte, stop - position)
        code = position - start
        yield row, slice(byte, byte + count), slice(code, code + count)
        position += count
