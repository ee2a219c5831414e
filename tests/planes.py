"""The layout of `comm.bits`, written a second time with numpy: bits and nibbles to bytes and back.

Slow, and independent of the library.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pack_bits(flags: Tensor) -> Tensor:
    """Pack bool flags of shape (N,): flag i is bit i // R of byte i % R, for R = 8 ceil(N / 64)."""
    num_bytes = -(-flags.numel() // 64) * 8
    padded = np.zeros(8 * num_bytes, dtype=bool)
    padded[: flags.numel()] = flags.cpu().numpy()
    rows = np.packbits(padded.reshape(8, -1), axis=0, bitorder="little")
    return torch.from_numpy(rows.reshape(-1))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first `numel` flags, bool."""
    rows = np.unpackbits(packed.cpu().numpy().reshape(1, -1), axis=0, bitorder="little")
    return torch.from_numpy(rows.reshape(-1)[:numel].astype(bool))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes below 16: the first half in the low nibbles, the second half above them."""
    padded = np.zeros(-(-codes.numel() // 16) * 16, dtype=np.uint8)
    padded[: codes.numel()] = codes.cpu().numpy()
    low, high = padded.reshape(2, -1)
    return torch.from_numpy(low | high << 4)


def unpack_nibbles(packed: Tensor, numel: int) -> Tensor:
    """Return the first `numel` codes, uint8."""
    return torch.cat([packed & 15, packed >> 4])[:numel].cpu()
