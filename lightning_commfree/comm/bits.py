"""Small codes to bytes and back: eight 1-bit flags a byte, two 4-bit codes a byte.

The layout is *planar*: N codes are padded with zeros and cut into as many equal rows as a byte
holds codes; byte j takes code j of every row. Rows are read and written in one piece, which makes
this fast: packing a row is one addition, unpacking it one shift and one mask. With R bytes packed:

======== ====== ================= =================================================================
code     rows   packed bytes R    where code i lies
======== ====== ================= =================================================================
1 bit    8      8 ceil(N / 64)    byte i % R, bit i // R, where bit 0 is the least significant one
4 bits   2      8 ceil(N / 16)    byte i % R, low nibble if i < R, else high nibble
======== ====== ================= =================================================================

A packed buffer is a whole number of 8-byte words, so that bitwise work can run on its
`view(torch.int64)`, 64 flags a word. The layout is defined in bytes: the machine's byte order does
not enter. The buffer does not hold N; whoever unpacks has to know it. A caller who deals packed
flags out to n ranks pads the flags to a multiple of 64 n first, so that each rank gets whole words.

What a code means is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_WORD_BYTES = 8


def packed_bits_size(numel: int) -> int:
    """Return the bytes that `numel` packed flags take, padding included: a multiple of 8."""
    return _packed_size(numel, bits=1)


def pack_bits(flags: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack flags, one bit each.

    Args:
        flags: bool, shape (N,).
        out: where the result is written, uint8, shape (packed_bits_size(N),), on the device of
            `flags`; keeping it over the steps saves the allocation. None: a new tensor.

    Returns:
        `out`; padding bits are 0.

    Raises:
        TypeError: `flags` or `out` has another dtype.
        ValueError: `flags` is not flat, or `out` has another shape or device.
    """
    _check("flags", flags, torch.bool)
    out = _buffer(out, packed_bits_size(flags.numel()), torch.uint8, flags.device)
    _pack(flags.view(torch.uint8), 1, out)
    return out


def unpack_bits(packed: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """Take apart what `pack_bits` made of `numel` flags.

    Args:
        packed: uint8, shape (packed_bits_size(numel),).
        numel: how many flags were packed, N.
        out: where the result is written, bool, shape (N,), on the device of `packed`. None: a new
            tensor.

    Returns:
        `out`.

    Raises:
        TypeError: `packed` or `out` has another dtype.
        ValueError: `packed` or `out` has another shape, or `out` is on another device.
    """
    _check("packed", packed, torch.uint8, packed_bits_size(numel))
    out = _buffer(out, numel, torch.bool, packed.device)
    _unpack(packed, 1, out.view(torch.uint8))
    return out


def packed_nibbles_size(numel: int) -> int:
    """Return the bytes that `numel` packed 4-bit codes take, padding included: a multiple of 8."""
    return _packed_size(numel, bits=4)


def pack_nibbles(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack 4-bit codes, two a byte.

    Args:
        codes: uint8, shape (N,), values 0 to 15. The values are checked on a CPU only: elsewhere
            the check would make the host wait for the device, and a larger value spoils the byte
            that it goes into.
        out: where the result is written, uint8, shape (packed_nibbles_size(N),), on the device of
            `codes`; keeping it over the steps saves the allocation. None: a new tensor.

    Returns:
        `out`; padding nibbles are 0.

    Raises:
        TypeError: `codes` or `out` has another dtype.
        ValueError: `codes` is not flat or holds a value above 15, or `out` has another shape or
            device.
    """
    _check("codes", codes, torch.uint8)
    if codes.device.type == "cpu" and codes.numel() and (largest := int(codes.amax())) > 15:
        raise ValueError(
            f"`codes` holds {largest}, but a 4-bit code is 0 to 15. Clamp what the codes come from."
        )
    out = _buffer(out, packed_nibbles_size(codes.numel()), torch.uint8, codes.device)
    _pack(codes, 4, out)
    return out


def unpack_nibbles(packed: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """Take apart what `pack_nibbles` made of `numel` codes.

    Args:
        packed: uint8, shape (packed_nibbles_size(numel),).
        numel: how many codes were packed, N.
        out: where the result is written, uint8, shape (N,), on the device of `packed`. None: a new
            tensor.

    Returns:
        `out`, values 0 to 15.

    Raises:
        TypeError: `packed` or `out` has another dtype.
        ValueError: `packed` or `out` has another shape, or `out` is on another device.
    """
    _check("packed", packed, torch.uint8, packed_nibbles_size(numel))
    out = _buffer(out, numel, torch.uint8, packed.device)
    _unpack(packed, 4, out)
    return out


def pack_bits_part(flags: Tensor, start: int, packed: Tensor) -> None:
    """Write some of the flags of a packed buffer, so that all of them need not exist at once.

    Parts come in ascending order, the first one from flag 0 on, and together cover all flags; the
    buffer then holds what `pack_bits` would have made of them, but for padding, which stays.

    Args:
        flags: bool, shape (n,).
        start: which flag the first of them is.
        packed: uint8, shape (packed_bits_size(N),) or longer by whole words, of all N flags. It
            must come zeroed if some flags are left out: they are then False.
    """
    _pack(flags.view(torch.uint8), 1, packed, start)


def unpack_bits_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Read some of the flags of a packed buffer.

    Args:
        packed: uint8, shape (packed_bits_size(N),) or longer by whole words, of all N flags.
        start: which flag is the first to be read.
        out: where flags `start` to `start` + n are written: uint8, shape (n,), values 0 and 1.
    """
    _unpack(packed, 1, out, start)


def pack_nibbles_part(codes: Tensor, start: int, packed: Tensor) -> None:
    """Write some of the codes of a packed buffer, so that all of them need not exist at once.

    Parts come in ascending order, the first one from code 0 on, and together cover all codes; the
    buffer then holds what `pack_nibbles` would have made of them.

    Args:
        codes: uint8, shape (n,), values 0 to 15, which is not checked.
        start: which code the first of them is.
        packed: uint8, shape (packed_nibbles_size(N),), of all N codes.
    """
    _pack(codes, 4, packed, start)


def lift_nibbles_part(packed: Tensor, start: int, out: Tensor) -> None:
    """Read some of the codes of a packed buffer into the upper ends of 16-bit words.

    Whoever makes floating-point numbers of codes shifts and masks the words anyway: the codes need
    not be taken out by themselves first.

    Args:
        packed: uint8, shape (packed_nibbles_size(N),), of all N codes.
        start: which code is the first to be read.
        out: int16, shape (n,); bits 12 to 15 of word i become code `start` + i, those below mean
            nothing.
    """
    for row, place, part in _places(start, out.numel(), packed.numel()):
        out[part].copy_(packed[place]).bitwise_left_shift_(8 if row else 12)


def _packed_size(numel: int, bits: int) -> int:
    if numel < 0:
        raise ValueError(f"`numel={numel}` is negative. Pass the number of codes, 0 or more.")
    return -(-numel * bits // (8 * _WORD_BYTES)) * _WORD_BYTES


def _pack(codes: Tensor, bits: int, out: Tensor, start: int = 0) -> None:
    if out.numel() == _WORD_BYTES and start == 0:  # only then may fewer codes come than a row holds
        out.zero_()
    for row, place, part in _places(start, codes.numel(), out.numel()):
        if row == 0:
            out[place].copy_(codes[part])
        else:  # rows occupy different bits: adding is OR-ing, and `alpha` shifts in the same pass
            out[place].add_(codes[part], alpha=1 << bits * row)


def _unpack(packed: Tensor, bits: int, out: Tensor, start: int = 0) -> None:
    mask, top_row = (1 << bits) - 1, 8 // bits - 1
    for row, place, part in _places(start, out.numel(), packed.numel()):
        if row == 0:
            torch.bitwise_and(packed[place], mask, out=out[part])
            continue
        torch.bitwise_right_shift(packed[place], bits * row, out=out[part])
        if row != top_row:  # above the top row's bits there is nothing to mask
            out[part].bitwise_and_(mask)


def _places(start: int, numel: int, row_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each row that `numel` codes from code `start` on touch: row, bytes, codes."""
    position, stop = start, start + numel
    while position < stop:
        row, byte = divmod(position, row_bytes)
        count = min(row_bytes - byte, stop - position)
        code = position - start
        yield row, slice(byte, byte + count), slice(code, code + count)
        position += count


def _check(name: str, tensor: Tensor, dtype: torch.dtype, numel: int | None = None) -> None:
    """Refuse a tensor that is not flat, not of `dtype`, or not of `numel` elements if given."""
    if tensor.dtype != dtype:
        raise TypeError(f"`{name}` came as {tensor.dtype}, but must be {dtype}. Convert it first.")
    if tensor.dim() != 1:
        shape = tuple(tensor.shape)
        raise ValueError(f"`{name}` came in shape {shape}, but must be flat. Flatten it first.")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(
            f"`{name}` came with {tensor.numel()} elements, but must have {numel}."
            " Pack, unpack and allocate with the same number of codes."
        )


def _buffer(out: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `out` if it fits, a new flat tensor if it is None."""
    if out is None:
        return torch.empty(numel, dtype=dtype, device=device)
    _check("out", out, dtype, numel)
    if out.device != device:
        raise ValueError(
            f"`out` came on {out.device}, but the input is on {device}. Allocate it there."
        )
    return out
