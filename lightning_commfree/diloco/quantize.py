"""Quantize fp32 values to 4-bit E3M0 codes or int8 and back, in blocks with a scale each.

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
- *NaN, Inf* (and what rounds to 2^120 or more): the whole block decodes to NaN, on all replicas,
  so a replica that diverged is noticed.

int8 uses the same blocks with an fp32 scale, the largest magnitude / 127, and rounds to the nearest
with ties to even; 8.125 bits a value. A block of which the largest magnitude is below 2^-118
becomes zero, and a NaN or Inf makes its block NaN here too.

On a CPU with numba, `quantize_numba` does this in compiled loops. Here it is torch operations, for
all devices. They go chunk by chunk, so that intermediate values stay in a CPU's caches, and without
comparisons of values: torch makes boolean tensors several times slower than it does arithmetic.
`python -m benchmarks.wire` measures the time against a copy. It also measures the error of this
and of other blocks and scales; block and scale were chosen by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

MANTISSA_BITS = 23
EXPONENT_OF_NAN = 255
LOWEST_TOP = 9  # biased exponent of 2^-118: below it the codes' lowest power would be subnormal
HIGHEST_TOP = 246  # of 2^119: above it 2^(E+8) is more than fp32 holds
_EXPONENT_BIAS = 127


class ChunkWorkspace:
    """Intermediate buffers between the values and the codes of one chunk, shape (B, V).

    Args:
        workspace: from which it is cut.
        shape: of the chunk: blocks, values of a block.
    """

    def __init__(self, workspace: Workspace, shape: tuple[int, int]) -> None:
        self._workspace, self.shape = workspace, shape

    @cached_property
    def fp32(self) -> Tensor:
        """Shape (B, V)."""
        return self._cut(torch.float32)

    @cached_property
    def bits(self) -> Tensor:
        """`fp32` as int32."""
        return self.fp32.view(torch.int32)

    @cached_property
    def half(self) -> Tensor:
        """Fp16, shape (B, V)."""
        return self._cut(torch.float16)

    @cached_property
    def half_bits(self) -> Tensor:
        """`half` as int16."""
        return self.half.view(torch.int16)

    @cached_property
    def codes(self) -> Tensor:
        """Uint8, shape (B * V,)."""
        return self._cut(torch.uint8).view(-1)

    @cached_property
    def more_codes(self) -> Tensor:
        """As `codes`."""
        return self._cut(torch.uint8, 1).view(-1)

    @cached_property
    def top(self) -> Tensor:
        """Int32, shape (B,)."""
        return self._workspace.new(self.shape[0], torch.int32)

    @cached_property
    def factor(self) -> Tensor:
        """Fp32, shape (B, 1)."""
        return self._workspace.new(self.shape[0], torch.float32).unsqueeze(1)

    def _cut(self, dtype: torch.dtype, place: int = 0) -> Tensor:
        num_blocks, block = self.shape
        return self._workspace.flat(dtype, place)[: num_blocks * block].view(self.shape)


class Workspace:
    """Buffers for chunks of any shape up to a size, and the tables of E3M0 by biased exponent.

    They are made at first use.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._flat: dict[tuple[torch.dtype, int], Tensor] = {}
        self._chunk: ChunkWorkspace | None = None

    def chunk(self, shape: tuple[int, int]) -> ChunkWorkspace:
        """Return buffers for a chunk of this shape; valid until another shape is asked for."""
        if self._chunk is None or self._chunk.shape != shape:
            self._chunk = ChunkWorkspace(self, shape)
        return self._chunk

    def flat(self, dtype: torch.dtype, place: int) -> Tensor:
        """Return the whole of one buffer."""
        if (dtype, place) not in self._flat:
            self._flat[dtype, place] = self.new(self.numel, dtype)
        return self._flat[dtype, place]

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of shape (numel,) that can be written to in and out of inference mode."""
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)

    @cached_property
    def scales(self) -> Tensor:
        """Uint8, shape (256,): the byte that goes over the wire."""
        return self._exponents().to(torch.uint8)

    @cached_property
    def factors(self) -> Tensor:
        """Fp32, shape (256, 1): 2^(-E-8), with which a block is multiplied; 0 to make it zero."""
        exponents = self._exponents()

        # in two steps, because the exponent of the product may lie below those of fp32
        factors = _power_of_two(2 * _EXPONENT_BIAS + 1 - exponents) * 2**-9
        return factors.masked_fill_(exponents == 0, 0.0).unsqueeze(1)

    @cached_property
    def powers(self) -> Tensor:
        """Fp32, shape (256, 1): 2^(E+8), with which a block is multiplied on the way back."""
        exponents = self._exponents()
        powers = _power_of_two(exponents.clamp(max=HIGHEST_TOP)) * 2**8
        return powers.masked_fill_(exponents == EXPONENT_OF_NAN, torch.nan).unsqueeze(1)

    def _exponents(self) -> Tensor:
        """Int32, shape (256,): biased exponents of blocks; 0 and 255 outside the range."""
        exponents = torch.arange(EXPONENT_OF_NAN + 1, dtype=torch.int32, device=self._device)
        exponents.masked_fill_(exponents < LOWEST_TOP, 0)
        return exponents.masked_fill_(exponents > HIGHEST_TOP, EXPONENT_OF_NAN)


# On a CPU allocating fresh pages takes longer than the work done in them, so a thread keeps its
# workspace; its contents mean nothing between two calls. A device's allocator caches memory itself.
_of_thread = threading.local()


def workspace_for(shape: tuple[int, int], device: torch.device) -> Workspace:
    """Return a workspace for a chunk of this shape; on a CPU the thread's own, kept for all."""
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


SMALLEST_LARGEST = 2.0**-118  # so that neither 127 / largest overflows nor the scale is subnormal


def encode_e3m0(values_BV: Tensor, scales_B: Tensor) -> Tensor:
    """Encode one chunk of fp32 values, blocks of V each.

    Args:
        values_BV: fp32.
        scales_B: filled: uint8: E + 127, 0 for a block that becomes zero, 255 for one that becomes
            NaN.

    Returns:
        The codes, uint8 in 0..15, shape (B * V,), good until the next call: bit 3 is the sign, bits
        0 to 2 are 0 for zero and m for 2^(E - 7 + m). In a block that becomes NaN they mean
        nothing.
    """
    shape = values_BV.shape[0], values_BV.shape[1]
    workspace = workspace_for(shape, values_BV.device)
    buffers = workspace.chunk(shape)

    # a NaN counts as an Inf
    top_B = _largest_bits(values_BV, buffers).clamp_(max=EXPONENT_OF_NAN << MANTISSA_BITS)
    # adding half of the mantissa's range carries into the exponent where 1.5 * 2^k is reached:
    # the exponent of the nearest power of two
    top_B.add_(1 << (MANTISSA_BITS - 1)).bitwise_right_shift_(MANTISSA_BITS)

    torch.index_select(workspace.scales, 0, top_B, out=scales_B)
    torch.index_select(workspace.factors, 0, top_B, out=buffers.factor)
    return _e3m0_codes(values_BV, buffers)


def _e3m0_codes(values_BV: Tensor, buffers: ChunkWorkspace) -> Tensor:
    """Let fp16 do the rounding: 2^(E-6) becomes its least normal number, 2^-14.

    With the sign in bit 15, exponents in bits 10 to 14 and below 2^-14 a linear range, the code m
    of 2^(E-7+m) then stands where fp16 has its exponent: adding half of a mantissa carries into it
    at 1.5 * 2^k, and between 0 and 2^-14 at the middle, as the rounding rule has it.
    """
    torch.mul(values_BV, buffers.factor, out=buffers.fp32)
    # sign, exponent and the first bit of the mantissa decide; the conversion would round the rest
    buffers.bits.bitwise_and_(-1 << (MANTISSA_BITS - 1))
    buffers.half.copy_(buffers.fp32)
    buffers.half_bits.add_(1 << 9).bitwise_right_shift_(10)

    codes = buffers.codes
    codes.copy_(buffers.half_bits.view(-1))  # m, or m - 32 = m + 224 with a sign
    with_sign = torch.sub(codes, 224 - 8, out=buffers.more_codes)
    return torch.minimum(codes, with_sign, out=codes)  # without a sign `with_sign` is m + 40


def decode_e3m0(lift_codes: Callable[[Tensor], None], scales_B: Tensor, out_BV: Tensor) -> None:
    """Decode one chunk of what `encode_e3m0` made codes and scales of.

    Args:
        lift_codes: called with an int16 tensor of shape (B * V,); writes the chunk's codes into its
            bits 12 to 15, and anything below.
        scales_B: uint8.
        out_BV: filled: fp32.
    """
    shape = out_BV.shape[0], out_BV.shape[1]
    workspace = workspace_for(shape, out_BV.device)
    buffers = workspace.chunk(shape)
    lift_codes(buffers.half_bits.view(-1))

    # s and mmm to bits 15 and 12 to 10: fp16 then reads 0 or 2^(m-15)
    buffers.half_bits.bitwise_right_shift_(2).bitwise_and_(-0x8000 | 0x1C00)
    buffers.top.copy_(scales_B)
    torch.index_select(workspace.powers, 0, buffers.top, out=buffers.factor)
    out_BV.copy_(buffers.half).mul_(buffers.factor)


def encode_int8(values_BV: Tensor, codes_BV: Tensor, scales_B: Tensor) -> None:
    """Encode one chunk of fp32 values, blocks of V each.

    Args:
        values_BV: fp32.
        codes_BV: filled: int8 in -127..127. In a block with a NaN or an Inf they mean nothing.
        scales_B: filled: fp32; NaN for a block with a NaN or an Inf.
    """
    shape = values_BV.shape[0], values_BV.shape[1]
    buffers = workspace_for(shape, values_BV.device).chunk(shape)
    # by a tensor: a CUDA device would multiply by the rounded reciprocal of a Python number
    limit = torch.full((), 127.0, dtype=torch.float32, device=values_BV.device)

    largest_B = _largest_bits(values_BV, buffers).view(torch.float32)
    largest_B.masked_fill_(largest_B < SMALLEST_LARGEST, 0.0)
    scales_B.copy_((largest_B / limit).masked_fill_(largest_B.isinf(), torch.nan))

    factor_B = (127 / largest_B).nan_to_num_(posinf=0.0)
    torch.mul(values_BV, factor_B.unsqueeze(1), out=buffers.fp32)
    codes_BV.copy_(buffers.fp32.round_())


def decode_int8(codes_BV: Tensor, scales_B: Tensor, out_BV: Tensor) -> None:
    """Decode one chunk of what `encode_int8` made codes and scales of, into fp32 `out_BV`."""
    out_BV.copy_(codes_BV).mul_(scales_B.unsqueeze(1))


def _largest_bits(values_BV: Tensor, buffers: ChunkWorkspace) -> Tensor:
    """Return every block's largest magnitude as fp32 writes it: int32, shape (B,).

    The bits of magnitudes are in the order of their values, with Inf and then NaN above them.
    """
    torch.abs(values_BV, out=buffers.fp32)
    return torch.amax(buffers.bits, dim=1, out=buffers.top)
