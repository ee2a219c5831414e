"""Arithmetic of the codecs: quantization to E3M0, int8 or two bits.

E3M0 (arXiv:2501.18512, section 2.4) has a sign bit and three exponent bits, which encode zero and
seven powers of two of either sign. The paper does not specify scales, blocks, rounding or zeros. In
this package:

- *Block*: 256 consecutive values of a fragment. The last one may be shorter.
- *Scale*: one byte, the exponent E of the power of two that the block's largest magnitude rounds
  to, biased by 127 as in fp32. The block's codes represent 2^E ... 2^(E-6) and 0.
- *Rounding*: to the nearest representable value, ties away from zero. The relative error of a value
  in the block's range is at most 1/3; values below 2^(E-7) become 0.
- *Zero* stays zero, so unused weights (embedding rows) do not move. Zeros, and values that become
  0, keep their sign. Powers of two in range are exact. A block whose largest magnitude rounds to
  less than 2^-118 becomes zero.
- *NaN, Inf*, and values that round to 2^120 or more: the whole block decodes to NaN on all
  replicas, so that divergence is detected.

Int8 uses the same blocks with an fp32 scale, the largest magnitude / 127, and rounds to nearest,
ties to even. A block whose largest magnitude is below 2^-118 becomes zero, and a NaN or Inf makes
the whole block NaN here too.

*Two bits* (`encode_int2`) are a sign and one of two magnitudes, 1 or 3 times a bf16 scale. A value
gets 3 if its magnitude exceeds the root mean square of its block, and the scale is then the
least-squares fit of the codes to the values. So the decoded values never have a larger norm than
the original ones, and error feedback converges for any values. For Gaussian values, magnitudes of 1
and 3 are nearly optimal: the error is 34.5% of the norm, compared with 34.3% for the Lloyd-Max
levels. MuLoCo's statistical quantization (arXiv:2505.23725) instead sends the means
of four bins per tensor, in fp32. As above, a block becomes zero if its largest magnitude is
below 2^-118, and NaN if its largest magnitude is 2^120 or more. In all other blocks, zeros become
1 times the scale.

Sums must not depend on the order of their terms, which differs between devices. So magnitudes are
first rounded to 8 bits relative to the block's largest: sums of whole numbers below 2^24 are exact
in fp32.

This module uses torch operations and runs on all devices. It avoids comparisons, because in torch,
creating boolean tensors is several times slower than arithmetic. `python -m benchmarks.wire`
measures speed, and compares the errors of E3M0 with different block sizes and scales.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

MANTISSA_BITS = 23
EXPONENT_OF_NAN = 255
MIN_TOP = 9  # biased exponent of 2^-118; below it the lowest code would be subnormal
MAX_TOP = 246  # biased exponent of 2^119; above it 2^(E+8) overflows fp32
_EXPONENT_BIAS = 127


class Workspace:
    """Scratch buffers for chunks of up to `numel` values, and lookup tables indexed by exponent."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}

    def buffer(self, dtype: torch.dtype, shape: torch.Size, slot: int = 0) -> Tensor:
        """Return a buffer of at most `numel` values; calls of one dtype and slot share memory."""
        if (dtype, slot) not in self._buffers:
            # a buffer created in inference mode would be read-only outside of it
            with torch.inference_mode(False):
                flat = torch.empty(self.numel, dtype=dtype, device=self._device)
            self._buffers[dtype, slot] = flat
        return self._buffers[dtype, slot][: shape.numel()].view(shape)

    @cached_property
    def scales(self) -> Tensor:
        """Lookup table for the scale byte to send for an E3M0 block: uint8, shape (256,)."""
        return self._exponents().to(torch.uint8)

    @cached_property
    def factors(self) -> Tensor:
        """Lookup table for E3M0 encoding factors, 2^(-E-8) or 0 for zero blocks: fp32, (256, 1)."""
        exponents = self._exponents()

        # in two steps, because the result may be subnormal in fp32
        factors = _power_of_two(2 * _EXPONENT_BIAS + 1 - exponents) * 2**-9
        return factors.masked_fill_(exponents == 0, 0.0).unsqueeze(1)

    @cached_property
    def powers(self) -> Tensor:
        """Lookup table for E3M0 decoding factors, 2^(E+8) or NaN for NaN blocks: fp32, (256, 1)."""
        exponents = self._exponents()
        powers = _power_of_two(exponents.clamp(max=MAX_TOP)) * 2**8
        return powers.masked_fill_(exponents == EXPONENT_OF_NAN, torch.nan).unsqueeze(1)

    @cached_property
    def unit_factors(self) -> Tensor:
        """Lookup table for factors that scale a block to magnitudes below 2^8: fp32, (256, 1)."""
        # by the biased exponent of the block's largest magnitude; 0 for a zero block
        exponents = self._exponents()
        factors = _power_of_two(2 * _EXPONENT_BIAS + 7 - exponents)
        return factors.masked_fill_(exponents == 0, 0.0).unsqueeze(1)

    @cached_property
    def units(self) -> Tensor:
        """Lookup table of the reciprocals of `unit_factors`, fp32, (256,); NaN for NaN blocks."""
        exponents = self._exponents()
        units = _power_of_two((exponents - 7).clamp_(min=0))
        return units.masked_fill_(exponents == EXPONENT_OF_NAN, torch.nan)

    def _exponents(self) -> Tensor:
        """Return the biased exponents 0 to 255: int32; 0 below `MIN_TOP`, 255 above `MAX_TOP`."""
        exponents = torch.arange(EXPONENT_OF_NAN + 1, dtype=torch.int32, device=self._device)
        exponents.masked_fill_(exponents < MIN_TOP, 0)
        return exponents.masked_fill_(exponents > MAX_TOP, EXPONENT_OF_NAN)


# On a CPU, allocating new pages takes longer than the computation that uses them, so each thread
# caches a workspace. On CUDA, the allocator caches memory itself.
_of_thread = threading.local()


def workspace_for(values: Tensor) -> Workspace:
    """Return a workspace that is large enough for `values`; on CPU, it is cached per thread."""
    numel, device = values.numel(), values.device
    if device.type != "cpu":
        return Workspace(numel, device)

    kept: Workspace | None = getattr(_of_thread, "workspace", None)
    if kept is None or kept.numel < numel:
        kept = _of_thread.workspace = Workspace(numel, device)
    return kept


def _power_of_two(biased_exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 for int32 `biased_exponents` from 1 to 254; 0 for 0."""
    return (biased_exponents << MANTISSA_BITS).view(torch.float32)


# lower limit for the largest magnitude in an int8 block: below it, 127 / largest would overflow and
# the scale would be subnormal
MIN_LARGEST = 2.0**-118


def encode_e3m0(values_BV: Tensor, scales_B: Tensor) -> Tensor:
    """Encode a chunk of B blocks of V fp32 values; return E3M0 codes, uint8, shape (B * V,).

    They are valid until the next call: bit 3 is the sign, and bits 0 to 2 are 0 for zero and m for
    2^(E - 7 + m); garbage in a NaN block. `scales_B` (uint8) receives E + 127, or 0 for a zero
    block and 255 for a NaN block.
    """
    workspace = workspace_for(values_BV)
    # the clamp turns NaN into Inf
    top_B = _largest_bits(values_BV, workspace).clamp_(max=EXPONENT_OF_NAN << MANTISSA_BITS)
    # adding half of the mantissa's range carries into the exponent at 1.5 * 2^k and above, which
    # gives the exponent of the nearest power of two
    top_B.add_(1 << (MANTISSA_BITS - 1)).bitwise_right_shift_(MANTISSA_BITS)

    torch.index_select(workspace.scales, 0, top_B, out=scales_B)
    return _e3m0_codes(values_BV, workspace.factors.index_select(0, top_B), workspace)


def _e3m0_codes(values_BV: Tensor, factors_B1: Tensor, workspace: Workspace) -> Tensor:
    """Compute E3M0 codes in fp16 arithmetic: uint8, shape (B * V,), valid until the next call.

    Values are scaled so that 2^(E-6) becomes 2^-14, the smallest normal fp16. fp16 has the sign in
    bit 15, the exponent in bits 10 to 14, and a linear range below 2^-14. So its exponent is the
    code m of 2^(E-7+m): adding half of the mantissa's range carries into the exponent at 1.5 * 2^k,
    and between 0 and 2^-14 at the midpoint, as the rounding rule requires.
    """
    shape = values_BV.shape
    scaled_BV = torch.mul(values_BV, factors_B1, out=workspace.buffer(torch.float32, shape))
    # Truncate to the bits that determine the code (sign, exponent, first bit of the mantissa),
    # because the conversion to fp16 would round.
    scaled_BV.view(torch.int32).bitwise_and_(-1 << (MANTISSA_BITS - 1))
    half_bits_BV = workspace.buffer(torch.float16, shape).copy_(scaled_BV).view(torch.int16)
    half_bits_BV.add_(1 << 9).bitwise_right_shift_(10)

    codes_BV = workspace.buffer(torch.uint8, shape)
    codes_BV.copy_(half_bits_BV)  # m, or for negative values m - 32, which is m + 224 in uint8
    more_BV = workspace.buffer(torch.uint8, shape, slot=1)
    torch.sub(codes_BV, 224 - 8, out=more_BV)  # m + 40, or for negative values m + 8
    return torch.minimum(codes_BV, more_BV, out=codes_BV).view(-1)


def decode_e3m0(unpack_codes: Callable[[Tensor], None], scales_B: Tensor, out_BV: Tensor) -> None:
    """Decode E3M0 codes, which `unpack_codes` writes into a buffer, into `out_BV` (fp32).

    The codes are those of `encode_e3m0`. `unpack_codes` writes them to bits 12 to 15 of an int16
    tensor of shape (B * V,), and garbage to the lower bits.
    """
    workspace = workspace_for(out_BV)
    half_BV = workspace.buffer(torch.float16, out_BV.shape)
    half_bits_BV = half_BV.view(torch.int16)
    unpack_codes(half_bits_BV.view(-1))

    # the sign moves to bit 15 and m to bits 12 to 10, which fp16 reads as 0 or 2^(m-15)
    half_bits_BV.bitwise_right_shift_(2).bitwise_and_(-0x8000 | 0x1C00)
    out_BV.copy_(half_BV).mul_(workspace.powers.index_select(0, scales_B.to(torch.int32)))


def encode_int8(values_BV: Tensor, codes_BV: Tensor, scales_B: Tensor) -> None:
    """Encode a chunk of B blocks of V fp32 values as int8 codes, -127 to 127, and fp32 scales.

    In a block with NaN or Inf, the scale is NaN, and the codes are garbage.
    """
    workspace = workspace_for(values_BV)
    # a tensor, because CUDA multiplies by the rounded reciprocal of a Python number
    limit = torch.full((), 127.0, dtype=torch.float32, device=values_BV.device)

    largest_B = _largest_bits(values_BV, workspace).view(torch.float32)
    largest_B.masked_fill_(largest_B < MIN_LARGEST, 0.0)
    scales_B.copy_((largest_B / limit).masked_fill_(largest_B.isinf(), torch.nan))

    factor_B = (127 / largest_B).nan_to_num_(posinf=0.0)
    scaled_BV = workspace.buffer(torch.float32, values_BV.shape)
    torch.mul(values_BV, factor_B.unsqueeze(1), out=scaled_BV)
    codes_BV.copy_(scaled_BV.round_())


def decode_int8(codes_BV: Tensor, scales_B: Tensor, out_BV: Tensor) -> None:
    """Decode a chunk encoded by `encode_int8`, and write it to `out_BV` (fp32, shape (B, V))."""
    out_BV.copy_(codes_BV).mul_(scales_B.unsqueeze(1))


def encode_int2(values_BV: Tensor, scales_B: Tensor) -> Tensor:
    """Encode each value in a chunk of B blocks of V fp32 values as -3, -1, 1 or 3 times a scale.

    Return the codes, uint8, shape (B * V,), valid until the next call: 0 to 3; 1 or 2 in a NaN
    block. `scales_B` (bf16) receives the scales, NaN for a NaN block. V is at most 256.
    """
    workspace, shape = workspace_for(values_BV), values_BV.shape
    tops_B = _largest_bits(values_BV, workspace).bitwise_right_shift_(MANTISSA_BITS)
    # `_largest_bits` has left the magnitudes in this buffer
    rounded_BV = workspace.buffer(torch.float32, shape)
    rounded_BV.mul_(workspace.unit_factors.index_select(0, tops_B)).round_()

    high_BV = workspace.buffer(torch.float32, shape, slot=1)
    torch.mul(rounded_BV, rounded_BV, out=high_BV)
    # a tensor, because CUDA multiplies by the rounded reciprocal of a Python number
    count = torch.full((), float(shape[1]), dtype=torch.float32, device=values_BV.device)
    high_BV.gt_(high_BV.sum(dim=1, keepdim=True) / count)  # 1 where the level is 3, else 0

    # the least-squares scale is sum(value level) / sum(level^2)
    product_B = rounded_BV.sum(dim=1)
    product_B += 2 * rounded_BV.mul_(high_BV).sum(dim=1)
    square_B = count + 8 * high_BV.sum(dim=1)
    scales_B.copy_(product_B / square_B * workspace.units.index_select(0, tops_B))

    # 0.5 or 1.5 with the value's sign becomes 0 to 3
    signed_BV = torch.copysign(high_BV.add_(0.5), values_BV, out=high_BV)
    codes_BV = workspace.buffer(torch.uint8, shape)
    return codes_BV.copy_(signed_BV.add_(1.5)).view(-1)


def decode_int2(codes_BV: Tensor, scales_B: Tensor, out: Tensor) -> None:
    """Decode a chunk encoded by `encode_int2`, and write it to `out` (fp32, shape (B, V))."""
    out.copy_(codes_BV).sub_(1.5).mul_(2 * scales_B.float().unsqueeze(1))


def _largest_bits(values_BV: Tensor, workspace: Workspace) -> Tensor:
    """Return the bit pattern of each block's largest magnitude: int32, shape (B,).

    The magnitudes remain in the workspace's first fp32 buffer.
    """
    magnitudes_BV = torch.abs(values_BV, out=workspace.buffer(torch.float32, values_BV.shape))
    # magnitudes sort like their bits, with Inf and then NaN at the top
    return magnitudes_BV.view(torch.int32).amax(dim=1)
