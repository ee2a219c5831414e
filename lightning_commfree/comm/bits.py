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
        packed: uint8, shape (..., R), where R is at least 8 ceil(N / 64) and a multiple of 8. Zero
            it before the first part, so that flags that are never written are False.
    """
    pack_codes_part(flags.view(torch.uint8), 1, start, packed)


def unpack_bits_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Read flags `start` to `start` + n from `packed` into `out`, as 0 and 1.

    `packed` and `out` are uint8, shapes (..., R) and (..., n).
    """
    unpack_codes_part(packed, 1, start, out)


def pack_codes_part(codes: Tensor, bits: int, start: int, packed: Tensor) -> None:
    """Write consecutive codes into a packed buffer.

    Call this for adjacent parts in ascending order until the buffer is complete: the first row
    overwrites the buffer's previous contents, and the other rows are added to it.

    Args:
        codes: uint8, shape (..., n), with values below 2^bits. This is not checked, because a check
            would synchronize a GPU.
        bits: 1, 2 or 4.
        start: index of the first code.
        packed: uint8, shape (..., packed_size(N, bits)).
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
    """Read codes `start` to `start` + n from a packed buffer into `out` (uint8, shape (..., n))."""
    for row, position, part in _positions(start, out.shape[-1], packed.shape[-1]):
        torch.bitwise_right_shift(packed[..., position], bits * row, out=out[..., part])
    out.bitwise_and_((1 << bits) - 1)


def lift_nibbles_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Read 4-bit codes into the upper bits of 16-bit words.

    Decoding to floating point shifts and masks the words anyway, so isolating the codes here would
    cost an extra pass.

    Args:
        packed: uint8, shape (packed_size(N, 4),).
        start: index of the first code to read.
        out: int16, shape (n,). Bits 12 to 15 of word i receive code `start` + i; the lower bits are
            garbage.
    """
    for row, position, part in _positions(start, out.numel(), packed.numel()):
        out[part].copy_(packed[position]).bitwise_left_shift_(8 if row else 12)


def _positions(start: int, numel: int, row_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (row, bytes, codes) for each row that has any of codes `start` to `start` + `numel`."""
    position, stop = start, start + numel
    while position < stop:
        row, byte = divmod(position, row_bytes)
        count = min(row_bytes - byte, stop - position)
        code = position - start
        yield row, slice(byte, byte + count), slice(code, code + count)
        position += count
