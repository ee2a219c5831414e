"""Triton kernels for a worker's arithmetic on a GPU, bit-identical to the torch operations.

Each kernel makes a single pass over memory; torch makes one per operation. The kernels support fp32
only. The functions have the same names and arguments as in `worker_numba`.

Each product and each sum is rounded to fp32: `enable_fp_fusion` is off, so that the compiler emits
no fused multiply-add. `try_out` compares the kernels with torch on the GPU before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.lion.vote import PackedDelta

_BLOCK = 1024  # values or bytes per program
jit: Callable[[Any], Any] = triton.jit  # typed here, for checks where Triton is not installed


def cast(
    momentum: Tensor,
    gradient: Tensor,
    beta: float,
    planes: Tensor,
    start: int,
    nonzeros: Tensor,
    nonfinite: Tensor,
) -> None:
    """Compute c = b1 m + (1 - b1) g and write its signs to two bit planes, c > 0 and c != 0."""
    # one thread writes each byte: the 8 values in a byte are `planes.shape[1]` apart
    bytes_used = min(momentum.numel(), planes.shape[1])
    sizes = start, momentum.numel(), planes.shape[1]
    tensors = gradient.float(), momentum, planes, nonzeros, nonfinite
    _launch(_cast, bytes_used, *tensors, *sizes, beta, 1 - beta)


def update_values(
    values: Tensor,
    planes: Tensor,
    weights: Sequence[int],
    offset: int,
    start: int,
    keep: float,
    lr: float,
) -> None:
    """Update parameter values in place: x <- `keep` * x - `lr` * Delta."""
    # weights are powers of two; pack their exponents into one integer, 4 bits each
    exponents = sum((weight.bit_length() - 1) << 4 * i for i, weight in enumerate(weights))
    sizes = start, values.numel(), planes.shape[1], len(weights), exponents, offset
    _launch(_update_values, values.numel(), values, planes, *sizes, keep, lr)


def update_momentum(momentum: Tensor, gradient: Tensor, beta: float) -> None:
    """Update a momentum buffer in place: m <- b2 * m + (1 - b2) * g."""
    numel = momentum.numel()
    _launch(_update_momentum, numel, momentum, gradient.float(), numel, beta, 1 - beta)


def try_out(device: str = "cuda") -> None:
    """Run every kernel once, and compare the results with those of torch operations.

    Raises:
        RuntimeError: a result differs.
    """
    numel, beta, keep, lr = 5000, 0.9, 0.97, 0.013
    x, m, g = torch.randn(3, numel, device=device)
    directions = m * beta + g * (1 - beta)
    expected, planes = torch.zeros(2, 2, 632, dtype=torch.uint8, device=device)
    pack_bits_part(torch.stack([directions > 0, directions != 0]), 0, expected)
    nonzeros, nonfinite = torch.zeros(2, 1, dtype=torch.int64, device=device)
    cast(m, g, beta, planes, 0, nonzeros, nonfinite)

    delta = PackedDelta(planes, (2, 4), 3)
    moved = x * keep - delta.read(0, torch.empty_like(x)) * lr
    update_values(x, *delta, 0, keep, lr)
    update_momentum(m, g, beta)
    found, wanted = (planes, x, m), (expected, moved, directions)
    if not all(map(torch.equal, found, wanted)) or int(nonfinite):
        raise RuntimeError("its results differ from those of torch")


def _launch(kernel: Any, numel: int, first: Tensor, *arguments: Any) -> None:
    if numel:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            grid = (triton.cdiv(numel, _BLOCK),)
            kernel[grid](first, *arguments, BLOCK=_BLOCK, enable_fp_fusion=False)


@jit
def _cast(  # noqa: PLR0913 - a kernel takes each size as a separate argument
    gradient: Any,
    momentum: Any,
    planes: Any,
    nonzeros: Any,
    nonfinite: Any,
    start: Any,
    numel: Any,
    row_bytes: Any,
    beta: Any,
    share: Any,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (place < row_bytes) & (place < numel)
    plus_at = planes + (start + place) % row_bytes
    nonzero_at = plus_at + row_bytes
    plus = tl.load(plus_at, mask=inside, other=0).to(tl.int32)
    nonzero = tl.load(nonzero_at, mask=inside, other=0).to(tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    is_nonfinite = tl.zeros((BLOCK,), tl.int32)

    for row in range(0, numel, row_bytes):
        mask = inside & (row + place < numel)
        m = tl.load(momentum + row + place, mask=mask, other=0.0)
        g = tl.load(gradient + row + place, mask=mask, other=0.0)
        c = m * beta + g * share
        bit = ((start + row + place) // row_bytes).to(tl.int32)
        voted = (c != 0.0).to(tl.int32)
        plus |= (c > 0.0).to(tl.int32) << bit
        nonzero |= voted << bit
        count += voted
        is_nonfinite |= 1 - (tl.abs(c) < float("inf")).to(tl.int32)

    tl.store(plus_at, plus.to(tl.uint8), mask=inside)
    tl.store(nonzero_at, nonzero.to(tl.uint8), mask=inside)
    tl.atomic_add(nonzeros, tl.sum(count).to(tl.int64))
    tl.atomic_max(nonfinite, tl.max(is_nonfinite))


@jit
def _update_values(  # noqa: PLR0913 - as above
    values: Any,
    planes: Any,
    start: Any,
    numel: Any,
    row_bytes: Any,
    digits: Any,
    exponents: Any,
    offset: Any,
    keep: Any,
    lr: Any,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    byte, row = (start + place) % row_bytes, ((start + place) // row_bytes).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.int32) - offset
    for d in range(digits):
        flags = tl.load(planes + d * row_bytes + byte, mask=mask, other=0).to(tl.int32)
        total += ((flags >> row) & 1) << ((exponents >> (4 * d)) & 15).to(tl.int32)

    delta = tl.div_rn(total.to(tl.float32), (tl.zeros((BLOCK,), tl.int32) + offset).to(tl.float32))
    x = tl.load(values + place, mask=mask, other=0.0)
    tl.store(values + place, x * keep - delta * lr, mask=mask)


@jit
def _update_momentum(
    momentum: Any,
    gradient: Any,
    numel: Any,
    beta: Any,
    share: Any,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    m = tl.load(momentum + place, mask=mask, other=0.0)
    g = tl.load(gradient + place, mask=mask, other=0.0)
    tl.store(momentum + place, m * beta + g * share, mask=mask)
