"""A hash of a tensor's bits, to find out whether ranks that must agree still do."""

from __future__ import annotations

import torch
from torch import Tensor

_PRIME = 0x9E3779B1
_ROW = 1024  # words
_PART = 2**14  # rows; a sum on a CUDA device first widens all that it is given: 128 MB here


def digest(tensor: Tensor) -> Tensor:
    """Hash a tensor of any dtype and shape.

    Args:
        tensor: contiguous.

    Returns:
        int64, no dimension, on the tensor's device; never 0 but by chance.
    """
    raw = tensor.detach().view(-1).view(torch.uint8)
    if raw.storage_offset() % 4:  # the words of a view that begins within one
        raw = raw.clone()
    whole = raw.numel() // 4 * 4
    words = raw[:whole].view(torch.int32)
    rows = words.numel() // _ROW * _ROW
    table = words[:rows].view(-1, _ROW)
    # two plain sums run at memory speed; a change that neither sees would have to cancel out in
    # its row and in its column
    columns = torch.zeros(_ROW, dtype=torch.int64, device=raw.device)
    sums = [columns]
    for part in torch.split(table, _PART):
        columns += part.sum(0, dtype=torch.int64)
        sums.append(part.sum(1, dtype=torch.int64))
    return mix_digests(torch.cat([*sums, words[rows:].to(torch.int64), raw[whole:].long()]))


def mix_digests(words: Tensor) -> Tensor:
    """Return the sum of int64 words, each times a number of its place; it wraps at 2^64."""
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device) * _PRIME
    return ((words * _PRIME + 1) * places).sum()
