"""Hashes of a tensor's bits, to check that ranks hold the same values without sending them."""

from __future__ import annotations

import torch
from torch import Tensor

_PRIME = 0x9E3779B1
_PIECE_BYTES = 1 << 20  # a multiple of 8; a few of it stay in a core's cache
_ROW = 1023  # words; odd, so that a change of the same bit in all of them changes their sum
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64, as signed numbers


def digest(tensor: Tensor) -> Tensor:
    """Hash a tensor of any dtype and shape.

    Args:
        tensor: contiguous.

    Returns:
        int64, no dimension, on the tensor's device; never 0 but by chance.
    """
    raw = tensor.detach().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # the words of a view that begins within one
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    rows = words.numel() // _ROW * _ROW
    table = words[:rows].view(-1, _ROW)
    # two plain sums run at memory speed, and of int64 without a wider copy. They wrap at 2^64: of
    # uppermost bits they see whether an odd number of them has changed, in a row or in a column
    found = torch.cat([table.sum(0), table.sum(1), words[rows:], raw[whole:].long()])
    return mix_digests(_scattered(found))


def thorough_digest(tensor: Tensor) -> Tensor:
    """Hash a tensor so that every change of a value, or of the order of values, shows.

    `digest` is several times as fast, but misses four changes that cancel out in the sums of two
    rows and of two columns.

    Args:
        tensor: contiguous, not empty, of any dtype and shape.

    Returns:
        int64, no dimension, on the tensor's device.
    """
    raw = tensor.detach().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    pieces = [raw[i : min(i + _PIECE_BYTES, whole)] for i in range(0, whole, _PIECE_BYTES)]
    # a clone begins at a whole word
    mixed = [mix_digests(_scattered(piece.clone().view(torch.int64))) for piece in pieces]
    if whole < raw.numel():
        mixed.append(mix_digests(_scattered(raw[whole:].long())))
    return mix_digests(_scattered(torch.stack(mixed)))


def mix_digests(words: Tensor) -> Tensor:
    """Return the sum of int64 words, each times a number for its position; it wraps at 2^64."""
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device) * _PRIME
    return ((words * _PRIME + 1) * places).sum()


def _scattered(words: Tensor) -> Tensor:
    """Scramble int64 words one to one, so that each bit affects all bits (splitmix64).

    Sums and products carry upwards only. Without this, changes of uppermost bits would cancel out
    in pairs, and would not reach the lower half of a digest, which some callers use alone.
    """
    for shift, factor in zip((30, 27), _MIX, strict=True):
        words = (words ^ _shifted(words, shift)) * factor
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros (torch's own shift copies the sign)."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
