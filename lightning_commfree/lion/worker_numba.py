"""Compiled CPU loops for a worker's arithmetic, bit-identical to the torch operations in `worker`.

Each loop makes a single pass over memory; torch makes one per operation. The loops support fp32
only, release the GIL and use one thread.

Each product and each sum is rounded to fp32: numba's `fastmath` is off, so LLVM neither fuses nor
reorders operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_commfree.comm.compiled import compiled

f32, i32, u8 = np.float32, np.int32, np.uint8
_BLOCK = 4096  # values per block, so that their totals stay in the L1 cache
_INF = f32(np.inf)


def cast(
    momentum: Tensor,  # (n,), fp32
    gradient: Tensor,  # (n,), floating point
    beta: float,  # b1
    planes: Tensor,  # (2, B), uint8, in the layout of `comm.bits`; the bits to write must be 0
    start: int,  # index of the first value in the planes
    nonzeros: Tensor,  # (1,), int64; the number of nonzero directions is added to it
    nonfinite: Tensor,  # (1,), int64; set to 1 if any direction is not finite
) -> None:
    """Set the bits c > 0 and c != 0 of c = b1 m + (1 - b1) g; count nonzeros, flag nonfinites."""
    values = momentum.numpy(), gradient.float().numpy()
    found, finite = _cast_loop(*values, f32(beta), f32(1 - beta), planes.numpy(), start)
    nonzeros += int(found)
    if not finite:
        nonfinite.fill_(1)


def update_values(
    values: Tensor,  # (n,), fp32
    planes: Tensor,
    weights: Sequence[int],
    offset: int,  # all three as in `vote.PackedDelta`
    start: int,  # index of the first value in the planes
    keep: float,  # 1 - lr * weight decay
    lr: float,
) -> None:
    """Update parameter values in place: x <- `keep` * x - `lr` * Delta."""
    bits, each = planes.numpy(), np.array(weights, i32)
    _update_values_loop(values.numpy(), bits, each, i32(offset), start, f32(keep), f32(lr))


def update_momentum(momentum: Tensor, gradient: Tensor, beta: float) -> None:
    """Update a momentum buffer, fp32, shape (n,), in place: m <- b2 * m + (1 - b2) * g."""
    _update_momentum_loop(momentum.numpy(), gradient.float().numpy(), f32(beta), f32(1 - beta))


def try_out() -> None:
    """Run every loop once, so that numba compiles it or loads it from its cache."""
    value, planes = torch.zeros(1), torch.zeros(2, 8, dtype=torch.uint8)
    cast(value, value, 0.5, planes, 0, *torch.zeros(2, 1, dtype=torch.int64))
    update_values(value, planes, (2, 1), 1, 0, 1.0, 0.0)
    update_momentum(value, value.clone(), 0.5)


@compiled
def _cast_row(
    momentum: Any, gradient: Any, beta: Any, one_minus_beta: Any, plus: Any, nonzero: Any, bit: Any
) -> Any:
    """Set `bit` in `plus` if c > 0, in `nonzero` if c != 0; return their count, nonfinite flag."""
    nonzeros, nonfinite = i32(0), i32(0)
    for i in range(momentum.size):
        c = f32(f32(momentum[i] * beta) + f32(gradient[i] * one_minus_beta))
        plus[i] |= bit if c > f32(0) else u8(0)
        nonzero[i] |= bit if c != f32(0) else u8(0)
        nonzeros += i32(1) if c != f32(0) else i32(0)
        nonfinite |= i32(0) if abs(c) < _INF else i32(1)
    return nonzeros, nonfinite


@compiled
def _cast_loop(
    momentum: Any, gradient: Any, beta: Any, one_minus_beta: Any, planes: Any, start: Any
) -> Any:
    """Run `cast`; return the number of nonzero directions, and whether all are finite."""
    nonzeros, nonfinite, done, row_bytes = 0, 0, 0, planes.shape[1]
    while done < momentum.size:
        row, byte = divmod(start + done, row_bytes)
        count = min(row_bytes - byte, momentum.size - done)
        part, place = slice(done, done + count), slice(byte, byte + count)
        found = _cast_row(
            momentum[part],
            gradient[part],
            beta,
            one_minus_beta,
            planes[0, place],
            planes[1, place],
            u8(1 << row),
        )
        nonzeros, nonfinite, done = nonzeros + found[0], nonfinite | found[1], done + count
    return nonzeros, nonfinite == 0


@compiled
def _add_bits(plane: Any, row: Any, weight: Any, totals: Any) -> None:
    """Add `weight` times bit `row` of each byte to `totals`, in place."""
    for i in range(plane.size):
        totals[i] = i32(totals[i] + i32(i32(i32(plane[i] >> row) & i32(1)) * weight))


@compiled
def _apply_delta(values: Any, totals: Any, divisor: Any, keep: Any, lr: Any) -> None:
    """Update in place: x <- `keep` * x - `lr` * totals / divisor."""
    for i in range(values.size):
        delta = f32(f32(totals[i]) / divisor)
        values[i] = f32(f32(values[i] * keep) - f32(delta * lr))


@compiled
def _update_values_loop(
    values: Any, planes: Any, weights: Any, offset: Any, start: Any, keep: Any, lr: Any
) -> None:
    totals_of_block, row_bytes, done = np.empty(_BLOCK, i32), planes.shape[1], 0
    while done < values.size:
        row, byte = divmod(start + done, row_bytes)
        count = min(row_bytes - byte, values.size - done, _BLOCK)
        totals = totals_of_block[:count]
        totals[:] = -offset
        for d in range(weights.size):
            _add_bits(planes[d, byte : byte + count], u8(row), weights[d], totals)
        _apply_delta(values[done : done + count], totals, f32(offset), keep, lr)
        done += count


@compiled
def _update_momentum_loop(momentum: Any, gradient: Any, beta: Any, one_minus_beta: Any) -> None:
    for i in range(momentum.size):
        momentum[i] = f32(f32(momentum[i] * beta) + f32(gradient[i] * one_minus_beta))
