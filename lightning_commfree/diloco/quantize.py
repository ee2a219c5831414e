"""Fp32 values to E3M0 codes of 4 bits, or to int8, and back; by blocks with a scale each.

E3M0 (arXiv:2501.18512, section 2.4) has a sign and three exponent bits: zero and seven powers of
two with either sign. The paper does not state scale, block, rounding or zero; here they are:

- *Block*: 256 consecutive values of a fragment. The last one may be shorter.
- *Scale*: one byte, the exponent E of the power of two that the block's largest magnitude rounds
  to, as fp32 writes exponents (biased by 127). The block's codes stand for 2^E ... 2^(E-6) and 0.
- *Rounding*: to the nearest code on the number line, ties away from zero. The relative error of a
  value within the block's range is at most 1/3; what is below 2^(E-7) becomes 0.
- *Zero* stays zero, so weights that were not touched (unused embedding rows) stay where they are;
  -0.0 becomes 0.0. Powers of two in range are exact. A block whose largest magnitude rounds to less
  than 2^-118 becomes zero.
- *NaN, Inf* (and what rounds up to 2^128): the whole block decodes to NaN, on all replicas alike: a
  replica that diverged shows.

The error is that of rounding to powers of two, and finer blocks or scales hardly lower it, so the
cheap ones are taken: on normal values the relative RMS error is 0.194 at 4.03 bits a value, and
0.188 at 4.5 bits with blocks of 64 and an fp32 scale (`tests/diloco/test_quantize.py`).

int8 uses the same blocks with an fp32 scale, the largest magnitude / 127, and rounds to the nearest
with ties to even; 8.125 bits a value. A NaN or Inf makes its block NaN here too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
_MANTISSA_BITS = 23
_EXPONENT_OF_NAN = 255
_INF_BITS = _EXPONENT_OF_NAN << _MANTISSA_BITS
_CODES = 7  # magnitudes besides zero
_SIGN = 8  # bit of a code


def num_blocks(numel: int) -> int:
    """Return how many blocks `numel` values make."""
    return -(-numel // BLOCK)


def encode_e3m0(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode fp32 `values` of shape (N,).

    Returns:
        Codes, uint8 in 0..15, shape (N,): bit 3 is the sign, bits 0 to 2 are 0 for zero and m for
        2^(E - 7 + m). Scales, uint8, shape (num_blocks(N),): E + 127, or 255 for a block with a NaN
        or an Inf.
    """
    bits_BV = _blocks(values).view(torch.int32)  # B blocks of V values
    magnitude_BV = (bits_BV & 0x7FFF_FFFF).clamp_(max=_INF_BITS)  # a NaN counts as an Inf
    # adding half of the mantissa's range carries into the exponent where 1.5 * 2^k is reached: the
    # exponent of the nearest power of two
    nearest_BV = (magnitude_BV + (1 << (_MANTISSA_BITS - 1))) >> _MANTISSA_BITS
    top_B = nearest_BV.amax(dim=1)
    top_B = torch.where(top_B > _CODES + 1, top_B, 0)  # lower exponents do not fit below the top
    below_BV = (top_B - _CODES).unsqueeze(1)
    codes_BV = (nearest_BV - below_BV).clamp_(0, _CODES)
    # between 2^(E-7) and its 1.5-fold the nearest is 2^(E-6), though the nearest power is 2^(E-7)
    reaches_lowest_BV = (magnitude_BV >> _MANTISSA_BITS) >= below_BV
    codes_BV = torch.maximum(codes_BV, reaches_lowest_BV.to(torch.int32))
    codes_BV = torch.where((top_B > 0).unsqueeze(1), codes_BV, 0)
    signs_BV = torch.where((bits_BV < 0) & (codes_BV > 0), _SIGN, 0)
    codes = (codes_BV + signs_BV).to(torch.uint8).reshape(-1)
    return codes[: values.numel()], top_B.clamp(max=_EXPONENT_OF_NAN).to(torch.uint8)


def decode_e3m0(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode what `encode_e3m0` returned into fp32 values of shape (N,)."""
    codes_BV = _blocks(codes).to(torch.int32)
    top_B1 = scales.to(torch.int32).unsqueeze(1)
    magnitude_BV = codes_BV & (_SIGN - 1)
    exponents_BV = torch.where(magnitude_BV > 0, top_B1 - _CODES + magnitude_BV, 0)
    values_BV = (exponents_BV << _MANTISSA_BITS).view(torch.float32)
    values_BV = torch.where(codes_BV >= _SIGN, -values_BV, values_BV)
    values_BV = torch.where(top_B1 == _EXPONENT_OF_NAN, torch.nan, values_BV)
    return values_BV.reshape(-1)[: codes.numel()]


def encode_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode fp32 `values` of shape (N,).

    Returns:
        Codes, int8 in -127..127, shape (N,). Scales, fp32, shape (num_blocks(N),); NaN for a block
        with a NaN or an Inf.
    """
    values_BV = _blocks(values)
    scales_B = values_BV.abs().amax(dim=1) / 127
    scales_B = torch.where(scales_B.isfinite(), scales_B, torch.nan)
    usable_B = scales_B > 0  # neither NaN nor zero, by which nothing is to be divided
    codes_BV = values_BV / torch.where(usable_B, scales_B, 1.0).unsqueeze(1)
    codes_BV = torch.where(usable_B.unsqueeze(1), codes_BV, 0.0).round_().clamp_(-127, 127)
    return codes_BV.to(torch.int8).reshape(-1)[: values.numel()], scales_B


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode what `encode_int8` returned into fp32 values of shape (N,)."""
    values_BV = _blocks(codes).to(torch.float32) * scales.unsqueeze(1)
    return values_BV.reshape(-1)[: codes.numel()]


def _blocks(flat: Tensor) -> Tensor:
    """See a flat tensor as (num_blocks, BLOCK), padded with zeros where it does not fill them."""
    missing = -flat.numel() % BLOCK
    return (pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
