"""The layout of `comm.bits`, written a second time with numpy: codes to bytes and back.

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


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes of 2 or 4 bits: as many equal rows as codes in a byte, the first lowest."""
    rows = 8 // bits
    padded = np.zeros(-(-codes.numel() // (8 * rows)) * 8 * rows, dtype=np.uint8)
    padded[: codes.numel()] = codes.cpu().numpy()
    shifted = [row << bits * i for i, row in enumerate(padded.reshape(rows, -1))]
    return torch.from_numpy(np.bitwise_or.reduce(shifted))


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the first `numel` codes, uint8."""
    rows = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.cat(rows)[:numel].cpu()
