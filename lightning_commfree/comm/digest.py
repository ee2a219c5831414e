"""A hash of a tensor's bits, to find out whether ranks that must agree still do."""

from __future__ import annotations

import torch
from torch import Tensor

_PRIME = 0x9E3779B1
_ROW = 1024  # words


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
    # two plain sums run at memory speed, and of int64 without a wider copy; a change that neither
    # sees would have to cancel out in its row and in its column
    found = torch.cat([table.sum(0), table.sum(1), words[rows:], raw[whole:].long()])
    return _folded(mix_digests(_folded(found)))


def mix_digests(words: Tensor) -> Tensor:
    """Return the sum of int64 words, each times a number of its place; it wraps at 2^64."""
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device) * _PRIME
    return ((words * _PRIME + 1) * places).sum()


def _folded(words: Tensor) -> Tensor:
    """Let the upper half of int64 words be seen in the lower one too; no two words become equal.

    Products and sums carry upwards only. Without it a change of the uppermost bit, in its row and
    in its column, would be lost in the mix, and others would not reach the lower half of a digest.
    """
    return words ^ ((words >> 32) & 0xFFFF_FFFF)
