"""Hash the bits of tensors, to check that ranks hold identical values without sending them."""

from __future__ import annotations

import torch
from torch import Tensor

_PRIME = 0x9E3779B1
_PIECE_BYTES = 1 << 20  # a multiple of 8; a few pieces fit into a core's cache
_ROW = 1023  # words; odd, so that flipping the same bit in all of them changes their sum
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # constants of splitmix64, as signed integers


def digest(tensor: Tensor) -> Tensor:
    """Return a fast hash of a contiguous tensor's bits: int64, 0-d, on the tensor's device.

    Simple inputs, such as all zeros, do not hash to 0. See `thorough_digest` for changes that this
    hash does not detect.
    """
    raw = tensor.detach().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # views of int64 need aligned memory
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    rows = words.numel() // _ROW * _ROW
    table = words[:rows].view(-1, _ROW)
    # Row and column sums run at memory speed. They wrap at 2^64, so flips of the top bit are
    # detected if some row or column has an odd number of them.
    found = torch.cat([table.sum(0), table.sum(1), words[rows:], raw[whole:].long()])
    return mix_digests(_scramble(found))


def thorough_digest(tensor: Tensor) -> Tensor:
    """Return a hash of a contiguous tensor's bits that depends on every value and on their order.

    `digest` is several times faster, but it arranges the 64-bit words in a table and hashes the row
    and column sums. It therefore misses changes that leave all sums the same, such as adding x to
    two opposite corners of a rectangle in the table and subtracting x from the other two. The
    tensor must not be empty. The result is int64, 0-d, on the tensor's device.
    """
    raw = tensor.detach().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    pieces = [raw[i : min(i + _PIECE_BYTES, whole)] for i in range(0, whole, _PIECE_BYTES)]
    # clone, because the copy is aligned to words
    mixed = [mix_digests(_scramble(piece.clone().view(torch.int64))) for piece in pieces]
    if whole < raw.numel():
        mixed.append(mix_digests(_scramble(raw[whole:].long())))
    return mix_digests(_scramble(torch.stack(mixed)))


def mix_digests(words: Tensor) -> Tensor:
    """Combine int64 words into one: a sum modulo 2^64 that depends on the order of the words."""
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device) * _PRIME
    return ((words * _PRIME + 1) * weights).sum()


def _scramble(words: Tensor) -> Tensor:
    """Scramble each int64 word bijectively, so that every input bit affects all bits (splitmix64).

    Carries in sums and products only move upward. Without scrambling, changes to top bits would
    cancel in pairs, and they would not affect the lower half of a digest, which some callers use
    alone.
    """
    for shift, factor in zip((30, 27), _MIX, strict=True):
        words = (words ^ _shift_right(words, shift)) * factor
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift int64 words right and fill with zeros (torch's shift copies the sign bit)."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
