"""Fp32 values to E3M0 codes of 4 bits, or to int8, and back; by blocks with a scale each.

E3M0 (arXiv:2501.18512, section 2.4) has a sign and three exponent bits: zero and seven powers of
two with either sign. The paper does not state scale, block, rounding or zero; here they are:

- *Block*: 256 consecutive values of a fragment. The last one may be shorter.
- *Scale*: one byte, the exponent E of the power of two that the block's largest magnitude rounds
  to, as fp32 writes exponents (biased by 127). The block's codes stand for 2^E ... 2^(E-6) and 0.
- *Rounding*: to the nearest code on the number line, ties away from zero. The relative error of a
  value within the block's range is at most 1/3; what is below 2^(E-7) becomes 0.
- *Zero* stays zero, so weights that were not touched (unused embedding rows) stay where they are.
  It keeps its sign, and so do values that become 0. Powers of two in range are exact. A block whose
  largest magnitude rounds to less than 2^-118 becomes zero.
- *NaN, Inf* (and what rounds up to 2^128): the whole block decodes to NaN, on all replicas alike: a
  replica that diverged shows.

int8 uses the same blocks with an fp32 scale, the largest magnitude / 127, and rounds to the nearest
with ties to even; 8.125 bits a value. A block of which the largest magnitude is below 2^-118
becomes zero, and a NaN or Inf makes its block NaN here too.

All of it runs piece by piece, so that what lies between values and codes stays in a CPU's caches,
and without comparisons of values: torch makes boolean tensors several times slower than it does
arithmetic. `python -m recipes.bench.wire` measures the time against a copy, and the error of this
and of other blocks and scales, from which these were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_EXPONENT_OF_NAN = 255
_LOWEST_TOP = 9  # biased exponent of 2^-118: below it the codes' lowest power would be subnormal
_SMALLEST_LARGEST = 2.0**-118  # so that neither 127 / largest overflows nor the scale is subnormal
_CPU_PIECE = 2**18  # values; 3 MB with the scratch: smaller pieces pay more for torch's calls
_DEVICE_PIECE = 2**25  # few launches; the scratch takes 8 bytes a value


class Piece(NamedTuple):
    """Values that are worked on together: whole blocks, or the last one where it is shorter."""

    values: slice
    blocks: slice

    @property
    def numel(self) -> int:
        """How many values it has."""
        return int(self.values.stop - self.values.start)

    @property
    def shape(self) -> tuple[int, int]:
        """How its values are seen as blocks."""
        num_blocks = int(self.blocks.stop - self.blocks.start)
        return num_blocks, self.numel // num_blocks


def num_blocks(numel: int) -> int:
    """Return how many blocks `numel` values make."""
    return -(-numel // BLOCK)


def pieces(numel: int, device: torch.device) -> Iterator[Piece]:
    """Cut `numel` values into pieces of a size that suits the device, in ascending order."""
    step = _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield Piece(slice(start, stop), slice(start // BLOCK, stop // BLOCK))
    if whole < numel:
        yield Piece(slice(whole, numel), slice(whole // BLOCK, whole // BLOCK + 1))


class _Scratch:
    """Room for what lies between the values and the codes of one piece, taken once for all."""

    def __init__(self, numel: int, device: torch.device) -> None:
        # the first piece is the largest
        size = max((piece.numel for piece in pieces(numel, device)), default=0)
        self.fp32 = torch.empty(size, dtype=torch.float32, device=device)
        self.half = torch.empty(size, dtype=torch.float16, device=device)
        self.byte, self.second_byte = (
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)
        )


def encode_e3m0(values: Tensor, scales: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Encode fp32 `values` of shape (N,).

    Args:
        values: what is encoded.
        scales: filled before the first codes come: uint8, shape (num_blocks(N),): E + 127, 0 for a
            block that becomes zero, 255 for one with a NaN or an Inf.

    Yields:
        Index of the first value of a piece and the piece's codes, uint8 in 0..15, good until the
        next ones come: bit 3 is the sign, bits 0 to 2 are 0 for zero and m for 2^(E - 7 + m). In a
        block with a NaN or an Inf they mean nothing.
    """
    scratch = _Scratch(values.numel(), values.device)
    infinity = _EXPONENT_OF_NAN << _MANTISSA_BITS
    largest_B = _largest_bits(values, scratch).clamp_(max=infinity)  # a NaN counts as an Inf
    # adding half of the mantissa's range carries into the exponent where 1.5 * 2^k is reached: the
    # exponent of the nearest power of two
    top_B = (largest_B + (1 << (_MANTISSA_BITS - 1))) >> _MANTISSA_BITS
    top_B.masked_fill_(top_B < _LOWEST_TOP, 0)
    scales.copy_(top_B.clamp_(max=_EXPONENT_OF_NAN))
    # 2^(-E-8), in two steps because the exponent of the product may lie below those of fp32
    factor_B = _power_of_two(2 * _EXPONENT_BIAS + 1 - top_B).masked_fill_(top_B == 0, 0.0) * 2**-9
    for piece in pieces(values.numel(), values.device):
        factor_B1 = factor_B[piece.blocks].unsqueeze(1)
        yield piece.values.start, _e3m0_codes(values[piece.values], piece, factor_B1, scratch)


def _e3m0_codes(values: Tensor, piece: Piece, factor_B1: Tensor, scratch: _Scratch) -> Tensor:
    """Let fp16 do the rounding: 2^(E-6) becomes its least normal number, 2^-14.

    With the sign in bit 15, exponents in bits 10 to 14 and below 2^-14 a linear range, the code m
    of 2^(E-7+m) then stands where fp16 has its exponent: adding half of a mantissa carries into it
    at 1.5 * 2^k, and between 0 and 2^-14 at the middle, as the rounding rule has it.
    """
    scaled = scratch.fp32[: piece.numel]
    torch.mul(values.view(piece.shape), factor_B1, out=scaled.view(piece.shape))
    # sign, exponent and the first bit of the mantissa decide; the conversion would round the rest
    scaled.view(torch.int32).bitwise_and_(-1 << (_MANTISSA_BITS - 1))
    half = scratch.half[: piece.numel].copy_(scaled)
    half_bits = half.view(torch.int16).add_(1 << 9).bitwise_right_shift_(10)
    codes = scratch.byte[: piece.numel].copy_(half_bits)  # m, or m - 32 = m + 224 with a sign
    with_sign = torch.sub(codes, 224 - 8, out=scratch.second_byte[: piece.numel])
    return torch.minimum(codes, with_sign, out=codes)  # without a sign `with_sign` is m + 40


def add_e3m0(read_codes: Callable[[int, Tensor], None], scales: Tensor, total: Tensor) -> None:
    """Add to `total`, fp32, shape (N,), what `encode_e3m0` made codes and scales of.

    Args:
        read_codes: called with the index of a value and a uint8 tensor of shape (n,); writes the
            codes of n values from that one on into it.
        scales: uint8, shape (num_blocks(N),).
        total: changed in place.
    """
    scratch = _Scratch(total.numel(), total.device)
    top_B = scales.to(torch.int32)
    scale_B = _power_of_two(top_B).masked_fill_(top_B == _EXPONENT_OF_NAN, torch.nan)
    for piece in pieces(total.numel(), total.device):
        codes = scratch.byte[: piece.numel]
        read_codes(piece.values.start, codes)
        # s and mmm to bits 15 and 12 to 10: fp16 then reads 0 or 2^(m-15)
        half_bits = scratch.half.view(torch.int16)[: piece.numel].copy_(codes)
        half_bits.bitwise_left_shift_(12).bitwise_right_shift_(2).bitwise_and_(-0x8000 | 0x1C00)
        powers = scratch.fp32[: piece.numel].copy_(half_bits.view(torch.float16))
        # the products are exact: whether the device fuses them into the sum does not matter
        total[piece.values].view(piece.shape).addcmul_(
            powers.view(piece.shape), scale_B[piece.blocks].unsqueeze(1), value=2.0**8
        )


def encode_int8(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Encode fp32 `values` of shape (N,).

    Args:
        values: what is encoded.
        codes: filled: int8 in -127..127, shape (N,). In a block with a NaN or an Inf they mean
            nothing.
        scales: filled: fp32, shape (num_blocks(N),); NaN for a block with a NaN or an Inf.
    """
    scratch = _Scratch(values.numel(), values.device)
    largest_B = _largest_bits(values, scratch).view(torch.float32)
    largest_B.masked_fill_(largest_B < _SMALLEST_LARGEST, 0.0)
    factor_B = (127 / largest_B).nan_to_num_(posinf=0.0)
    # by a tensor: a CUDA device would multiply by the rounded reciprocal of a Python number
    limit = torch.full((), 127.0, device=values.device)
    scales.copy_((largest_B / limit).masked_fill_(largest_B.isinf(), torch.nan))
    for piece in pieces(values.numel(), values.device):
        scaled = scratch.fp32[: piece.numel]
        factor_B1 = factor_B[piece.blocks].unsqueeze(1)
        torch.mul(values[piece.values].view(piece.shape), factor_B1, out=scaled.view(piece.shape))
        codes[piece.values].copy_(scaled.round_())


def add_int8(codes: Tensor, scales: Tensor, total: Tensor) -> None:
    """Add to `total`, fp32, shape (N,), what `encode_int8` made codes and scales of."""
    scratch = _Scratch(total.numel(), total.device)
    for piece in pieces(total.numel(), total.device):
        decoded = scratch.fp32[: piece.numel].copy_(codes[piece.values])
        decoded.view(piece.shape).mul_(scales[piece.blocks].unsqueeze(1))
        # a step of its own: fused with the product it would round differently from device to device
        total[piece.values].add_(decoded)


def _largest_bits(values: Tensor, scratch: _Scratch) -> Tensor:
    """Return every block's largest magnitude as fp32 writes it: int32, shape (num_blocks(N),).

    The bits of magnitudes are in the order of their values, with Inf and then NaN above them.
    """
    largest_B = torch.empty(num_blocks(values.numel()), dtype=torch.int32, device=values.device)
    for piece in pieces(values.numel(), values.device):
        magnitudes = torch.abs(values[piece.values], out=scratch.fp32[: piece.numel])
        bits_BV = magnitudes.view(torch.int32).view(piece.shape)
        torch.amax(bits_BV, dim=1, out=largest_B[piece.blocks])
    return largest_B


def _power_of_two(biased_exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 for int32 `biased_exponents` from 1 to 254; 0 for 0."""
    return (biased_exponents << _MANTISSA_BITS).view(torch.float32)
