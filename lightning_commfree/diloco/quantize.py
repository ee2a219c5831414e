"""Quantize blocks of fp32 values to 4-bit E3M0 codes or int8, and decode them.

E3M0 (arXiv:2501.18512, section 2.4) has a sign bit and three exponent bits: zero and seven powers
of two with either sign. The paper does not specify scale, block, rounding and zeros. Here:

- *Block*: 256 consecutive values of a fragment. The last one may be shorter.
- *Scale*: one byte, the exponent E of the power of two that the block's largest magnitude rounds
  to, biased by 127 as in fp32. The block's codes represent 2^E ... 2^(E-6) and 0.
- *Rounding*: to the nearest representable value, ties away from zero. The relative error of a value
  in the block's range is at most 1/3; values below 2^(E-7) become 0.
- *Zero* stays zero, so unused weights (embedding rows) do not move. Zeros, and values that become
  0, keep their sign. Powers of two in range are exact. A block whose largest magnitude rounds to
  less than 2^-118 becomes zero.
- *NaN, Inf*, and values that round to 2^120 or more: the whole block decodes to NaN on all
  replicas, so that divergence is noticed.

Int8 uses the same blocks with an fp32 scale, the largest magnitude / 127, and rounds to nearest,
ties to even. A block whose largest magnitude is below 2^-118 becomes zero, and a NaN or Inf makes
its block NaN here too.

This module uses torch operations and runs on all devices. It avoids comparisons, because torch
creates boolean tensors several times slower than it computes. `python -m benchmarks.wire` measures
times, and errors for this and other block sizes and scales.
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


class ChunkWorkspace:
    """Intermediate buffers for a chunk of B blocks of V values; `shape` is (B, V)."""

    def __init__(self, workspace: Workspace, shape: tuple[int, int]) -> None:
        self._workspace, self.shape = workspace, shape

    @cached_property
    def fp32(self) -> Tensor:
        """Buffer for values: fp32, shape (B, V)."""
        return self._cut(torch.float32)

    @cached_property
    def bits(self) -> Tensor:
        """The bits of `fp32`, as int32."""
        return self.fp32.view(torch.int32)

    @cached_property
    def half(self) -> Tensor:
        """Buffer for scaled values: fp16, shape (B, V)."""
        return self._cut(torch.float16)

    @cached_property
    def half_bits(self) -> Tensor:
        """The bits of `half`, as int16."""
        return self.half.view(torch.int16)

    @cached_property
    def codes(self) -> Tensor:
        """Buffer for codes: uint8, shape (B * V,)."""
        return self._cut(torch.uint8).view(-1)

    @cached_property
    def more_codes(self) -> Tensor:
        """A second buffer like `codes`."""
        return self._cut(torch.uint8, 1).view(-1)

    @cached_property
    def top(self) -> Tensor:
        """Buffer for the blocks' largest exponents: int32, shape (B,)."""
        return self._workspace.new(self.shape[0], torch.int32)

    @cached_property
    def factor(self) -> Tensor:
        """Buffer for the blocks' factors: fp32, shape (B, 1)."""
        return self._workspace.new(self.shape[0], torch.float32).unsqueeze(1)

    def _cut(self, dtype: torch.dtype, slot: int = 0) -> Tensor:
        num_blocks, block = self.shape
        return self._workspace.flat(dtype, slot)[: num_blocks * block].view(self.shape)


class Workspace:
    """Lazy buffers for chunks of up to `numel` values, and lookup tables by biased exponent."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._flat: dict[tuple[torch.dtype, int], Tensor] = {}
        self._chunk: ChunkWorkspace | None = None

    def chunk(self, shape: tuple[int, int]) -> ChunkWorkspace:
        """Return the buffers for a chunk; valid until a chunk of another shape is requested."""
        if self._chunk is None or self._chunk.shape != shape:
            self._chunk = ChunkWorkspace(self, shape)
        return self._chunk

    def flat(self, dtype: torch.dtype, slot: int) -> Tensor:
        """Return a buffer of `numel` values, one per dtype and slot."""
        if (dtype, slot) not in self._flat:
            self._flat[dtype, slot] = self.new(self.numel, dtype)
        return self._flat[dtype, slot]

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Create a tensor of shape (numel,) that is writable in and out of inference mode."""
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)

    @cached_property
    def scales(self) -> Tensor:
        """Lookup table for the scale byte on the wire: uint8, shape (256,)."""
        return self._exponents().to(torch.uint8)

    @cached_property
    def factors(self) -> Tensor:
        """Lookup table for the encoding factor 2^(-E-8), 0 for zero blocks: fp32, (256, 1)."""
        exponents = self._exponents()

        # in two steps, because the result may be below the normal numbers of fp32
        factors = _power_of_two(2 * _EXPONENT_BIAS + 1 - exponents) * 2**-9
        return factors.masked_fill_(exponents == 0, 0.0).unsqueeze(1)

    @cached_property
    def powers(self) -> Tensor:
        """Lookup table for the decoding factor 2^(E+8): fp32, shape (256, 1)."""
        exponents = self._exponents()
        powers = _power_of_two(exponents.clamp(max=MAX_TOP)) * 2**8
        return powers.masked_fill_(exponents == EXPONENT_OF_NAN, torch.nan).unsqueeze(1)

    def _exponents(self) -> Tensor:
        """Return each table entry's biased exponent, int32; 0 below the range, 255 above it."""
        exponents = torch.arange(EXPONENT_OF_NAN + 1, dtype=torch.int32, device=self._device)
        exponents.masked_fill_(exponents < MIN_TOP, 0)
        return exponents.masked_fill_(exponents > MAX_TOP, EXPONENT_OF_NAN)


# On a CPU, allocating fresh pages takes longer than the work done in them, so each thread keeps a
# workspace, for its speed only. CUDA's allocator caches memory itself.
_of_thread = threading.local()


def workspace_for(shape: tuple[int, int], device: torch.device) -> Workspace:
    """Return a workspace for a chunk of this shape; on a CPU, it is cached per thread."""
    numel = shape[0] * shape[1]
    if device.type != "cpu":
        return Workspace(numel, device)

    kept: Workspace | None = getattr(_of_thread, "workspace", None)
    if kept is None or kept.numel < numel:
        kept = _of_thread.workspace = Workspace(numel, device)
    return kept


def _power_of_two(biased_exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 for int32 `biased_exponents` from 1 to 254; 0 for 0."""
    return (biased_exponents << MANTISSA_BITS).view(torch.float32)


# smallest magnitude of an int8 block's largest value: smaller, 127 / largest would overflow and the
# scale would be subnormal
MIN_LARGEST = 2.0**-118


def encode_e3m0(values_BV: Tensor, scales_B: Tensor) -> Tensor:
    """Encode a chunk of B blocks of V fp32 values.

    Args:
        values_BV: fp32.
        scales_B: uint8, filled: E + 127, 0 for a zero block, 255 for a NaN block.

    Returns:
        The codes, uint8, shape (B * V,), valid until the next call. Bit 3 is the sign; bits 0 to 2
        are 0 for zero and m for 2^(E - 7 + m). Codes in a NaN block are garbage.
    """
    shape = values_BV.shape[0], values_BV.shape[1]
    workspace = workspace_for(shape, values_BV.device)
    buffers = workspace.chunk(shape)

    # the clamp turns NaN into Inf
    top_B = _largest_bits(values_BV, buffers).clamp_(max=EXPONENT_OF_NAN << MANTISSA_BITS)
    # adding half of the mantissa's range carries into the exponent from 1.5 * 2^k on, which gives
    # the exponent of the nearest power of two
    top_B.add_(1 << (MANTISSA_BITS - 1)).bitwise_right_shift_(MANTISSA_BITS)

    torch.index_select(workspace.scales, 0, top_B, out=scales_B)
    torch.index_select(workspace.factors, 0, top_B, out=buffers.factor)
    return _e3m0_codes(values_BV, buffers)


def _e3m0_codes(values_BV: Tensor, buffers: ChunkWorkspace) -> Tensor:
    """Compute codes with fp16 arithmetic, by scaling 2^(E-6) to fp16's smallest normal, 2^-14.

    fp16 has the sign in bit 15, the exponent in bits 10 to 14, and a linear range below 2^-14. So
    its exponent is the code m of 2^(E-7+m): adding half of a mantissa carries into it at 1.5 * 2^k,
    and between 0 and 2^-14 at the midpoint, as the rounding rule requires.
    """
    torch.mul(values_BV, buffers.factor, out=buffers.fp32)
    # Truncate to the bits that decide (sign, exponent, first bit of the mantissa), because the
    # conversion to fp16 would round.
    buffers.bits.bitwise_and_(-1 << (MANTISSA_BITS - 1))
    buffers.half.copy_(buffers.fp32)
    buffers.half_bits.add_(1 << 9).bitwise_right_shift_(10)

    codes = buffers.codes
    codes.copy_(buffers.half_bits.view(-1))  # m; if negative, m - 32, which is m + 224 in uint8
    with_sign = torch.sub(codes, 224 - 8, out=buffers.more_codes)  # if negative m + 8, else m + 40
    return torch.minimum(codes, with_sign, out=codes)


def decode_e3m0(lift_codes: Callable[[Tensor], None], scales_B: Tensor, out_BV: Tensor) -> None:
    """Decode a chunk that `encode_e3m0` encoded.

    Args:
        lift_codes: writes the chunk's codes to bits 12 to 15, and garbage to the lower bits, of an
            int16 tensor of shape (B * V,).
        scales_B: uint8.
        out_BV: fp32, filled.
    """
    shape = out_BV.shape[0], out_BV.shape[1]
    workspace = workspace_for(shape, out_BV.device)
    buffers = workspace.chunk(shape)
    lift_codes(buffers.half_bits.view(-1))

    # the sign moves to bit 15 and m to bits 12 to 10, which fp16 reads as 0 or 2^(m-15)
    buffers.half_bits.bitwise_right_shift_(2).bitwise_and_(-0x8000 | 0x1C00)
    buffers.top.copy_(scales_B)
    torch.index_select(workspace.powers, 0, buffers.top, out=buffers.factor)
    out_BV.copy_(buffers.half).mul_(buffers.factor)


def encode_int8(values_BV: Tensor, codes_BV: Tensor, scales_B: Tensor) -> None:
    """Encode a chunk of B blocks of V fp32 values.

    Args:
        values_BV: fp32.
        codes_BV: int8 in -127..127, filled; garbage in a block with NaN or Inf.
        scales_B: fp32, filled; NaN for a block with NaN or Inf.
    """
    shape = values_BV.shape[0], values_BV.shape[1]
    buffers = workspace_for(shape, values_BV.device).chunk(shape)
    # a tensor, because CUDA multiplies by the rounded reciprocal of a Python number
    limit = torch.full((), 127.0, dtype=torch.float32, device=values_BV.device)

    largest_B = _largest_bits(values_BV, buffers).view(torch.float32)
    largest_B.masked_fill_(largest_B < MIN_LARGEST, 0.0)
    scales_B.copy_((largest_B / limit).masked_fill_(largest_B.isinf(), torch.nan))

    factor_B = (127 / largest_B).nan_to_num_(posinf=0.0)
    torch.mul(values_BV, factor_B.unsqueeze(1), out=buffers.fp32)
    codes_BV.copy_(buffers.fp32.round_())


def decode_int8(codes_BV: Tensor, scales_B: Tensor, out_BV: Tensor) -> None:
    """Decode a chunk that `encode_int8` encoded into `out_BV`, fp32."""
    out_BV.copy_(codes_BV).mul_(scales_B.unsqueeze(1))


def _largest_bits(values_BV: Tensor, buffers: ChunkWorkspace) -> Tensor:
    """Return the bits of every block's largest magnitude: int32, shape (B,)."""
    torch.abs(values_BV, out=buffers.fp32)
    # magnitudes have the order of their bits, with Inf and then NaN at the top
    return torch.amax(buffers.bits, dim=1, out=buffers.top)
