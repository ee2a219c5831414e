"""Triton kernels for a worker's arithmetic on a GPU, bit-identical to the torch operations.

Each kernel makes a single pass over memory; torch makes one per operation. Momentum buffers and
parameter values are fp32; gradients may have any floating-point dtype, and are converted as they
are read. The functions have the same names and arguments as in `worker_numba`.

Each product and each sum is rounded to fp32: `enable_fp_fusion` is off, so that the compiler emits
no fused multiply-add. `try_out` compares the kernels with torch on the GPU before they are used.

Triton evaluates the annotations of a kernel's arguments, and refuses any global name that is not a
module or part of Triton: `Any` would not compile. So arguments are annotated with `tl.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    """Write the bits c > 0 and c != 0 of c = b1 m + (1 - b1) g; count nonzeros, flag nonfinites."""
    # one thread writes each byte: the 8 values in a byte are `planes.shape[1]` apart
    bytes_used = min(momentum.numel(), planes.shape[1])
    sizes = start, momentum.numel(), planes.shape[1]
    tensors = gradient, momentum, planes, nonzeros, nonfinite
    _launch(_cast_kernel, bytes_used, *tensors, *sizes, beta, 1 - beta)


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
    _launch(_update_values_kernel, values.numel(), values, planes, *sizes, keep, lr)


def follow(master: Tensor, values: Tensor) -> None:
    """Set the master copy, in place, to each bf16 value that it does not round to."""
    _launch(_follow_kernel, master.numel(), master, values, master.numel())


def update_momentum(momentum: Tensor, gradient: Tensor, beta: float) -> None:
    """Update a momentum buffer in place: m <- b2 * m + (1 - b2) * g."""
    numel = momentum.numel()
    _launch(_update_momentum_kernel, numel, momentum, gradient, numel, beta, 1 - beta)


def try_out(device: str = "cuda") -> None:
    """Run every kernel; raise a `RuntimeError` if a result differs from torch's."""
    # A CPU generator of its own: the fit's random numbers, which a resume may just have restored,
    # must not depend on whether the kernels are used.
    draw = partial(torch.randn, 5000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        x, momentum = draw().to(device), draw().to(device)
        _compare_with_torch(x, momentum, draw().to(device, dtype))
    master, values = draw().to(device), draw().to(device, torch.bfloat16)
    values[::2] = master[::2].bfloat16()
    expected = torch.where(master.bfloat16() == values, master, values.float())
    follow(master, values)
    _check_equals_torch([master], [expected])


def _compare_with_torch(x: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """Run the kernels on these tensors; raise if a result differs from torch's."""
    beta, keep, lr = 0.9, 0.97, 0.013
    directions = momentum * beta + gradient.float() * (1 - beta)
    expected, planes = torch.zeros(2, 2, 632, dtype=torch.uint8, device=x.device)
    pack_bits_part(torch.stack([directions > 0, directions != 0]), 0, expected)
    nonzeros, nonfinite = torch.zeros(2, 1, dtype=torch.int64, device=x.device)
    cast(momentum, gradient, beta, planes, 0, nonzeros, nonfinite)

    delta = PackedDelta(planes, (2, 4), 3)
    moved = x * keep - delta.read(0, torch.empty_like(x)) * lr
    update_values(x, *delta, 0, keep, lr)
    update_momentum(momentum, gradient, beta)
    nothing = torch.zeros_like(nonfinite)
    _check_equals_torch((planes, x, momentum, nonfinite), (expected, moved, directions, nothing))


def _check_equals_torch(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if not all(map(torch.equal, found, expected)):
        raise RuntimeError("its results differ from those of torch")


def _launch(kernel: Any, numel: int, first: Tensor, *arguments: Any) -> None:
    """Run a kernel for `numel` elements on the device of `first`; nothing if there are none."""
    if numel:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            grid = (triton.cdiv(numel, _BLOCK),)
            kernel[grid](first, *arguments, BLOCK=_BLOCK, enable_fp_fusion=False)


@jit
def _cast_kernel(  # noqa: PLR0913 - a kernel takes each size as a separate argument
    gradient: tl.tensor,
    momentum: tl.tensor,
    planes: tl.tensor,
    nonzeros: tl.tensor,
    nonfinite: tl.tensor,
    start: tl.tensor,
    numel: tl.tensor,
    row_bytes: tl.tensor,
    beta: tl.tensor,
    one_minus_beta: tl.tensor,
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
        g = tl.load(gradient + row + place, mask=mask, other=0.0).to(tl.float32)
        c = m * beta + g * one_minus_beta
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
def _update_values_kernel(  # noqa: PLR0913 - as above
    values: tl.tensor,
    planes: tl.tensor,
    start: tl.tensor,
    numel: tl.tensor,
    row_bytes: tl.tensor,
    digits: tl.tensor,
    exponents: tl.tensor,
    offset: tl.tensor,
    keep: tl.tensor,
    lr: tl.tensor,
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
def _follow_kernel(
    master: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    m = tl.load(master + place, mask=mask, other=0.0)
    x = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    # to the nearest bf16, ties to even; Triton's interpreter would cut the lower bits off
    bits = m.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    tl.store(master + place, x, mask=mask & (rounded.to(tl.float32, bitcast=True) != x))


@jit
def _update_momentum_kernel(
    momentum: tl.tensor,
    gradient: tl.tensor,
    numel: tl.tensor,
    beta: tl.tensor,
    one_minus_beta: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numel
    m = tl.load(momentum + place, mask=mask, other=0.0)
    g = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(momentum + place, m * beta + g * one_minus_beta, mask=mask)
