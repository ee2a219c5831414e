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
- *NaN, Inf* (and what rounds to 2^120 or more): the whole block decodes to NaN, on all replicas
  alike: a replica that diverged shows.

int8 uses the same blocks with an fp32 scale, the largest magnitude / 127, and rounds to the nearest
with ties to even; 8.125 bits a value. A block of which the largest magnitude is below 2^-118
becomes zero, and a NaN or Inf makes its block NaN here too.

All of it runs piece by piece, so that what lies between values and codes stays in a CPU's caches,
and without comparisons of values: torch makes boolean tensors several times slower than it does
arithmetic. `python -m recipes.bench.wire` measures the time against a copy, and the error of this
and of other blocks and scales, from which these were chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_EXPONENT_OF_NAN = 255
_LOWEST_TOP = 9  # biased exponent of 2^-118: below it the codes' lowest power would be subnormal
_HIGHEST_TOP = 246  # of 2^119: above it 2^(E+8) is more than fp32 holds
_SMALLEST_LARGEST = 2.0**-118  # so that neither 127 / largest overflows nor the scale is subnormal
_CPU_PIECE = 2**19  # values; 4 MB of scratch: smaller pieces pay more for torch's calls
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


class _Room:
    """What lies between the values and the codes of one piece; shape (B, V): blocks, their values.

    Args:
        scratch: from which it is cut.
        shape: of the piece.
    """

    def __init__(self, scratch: _Scratch, shape: tuple[int, int]) -> None:
        self._scratch, self.shape = scratch, shape

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
        return self._scratch.new(self.shape[0], torch.int32)

    @cached_property
    def factor(self) -> Tensor:
        """Fp32, shape (B, 1)."""
        return self._scratch.new(self.shape[0], torch.float32).unsqueeze(1)

    def _cut(self, dtype: torch.dtype, place: int = 0) -> Tensor:
        num_blocks, block = self.shape
        return self._scratch.flat(dtype, place)[: num_blocks * block].view(self.shape)


class _Scratch:
    """Room for pieces of any shape up to a size, and what E3M0 looks up by a biased exponent.

    All of it is made when it is asked for.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._flat: dict[tuple[torch.dtype, int], Tensor] = {}
        self._room: _Room | None = None

    def room(self, shape: tuple[int, int]) -> _Room:
        """Return what a piece of this shape is worked on in; good until another shape comes."""
        if self._room is None or self._room.shape != shape:
            self._room = _Room(self, shape)
        return self._room

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
        powers = _power_of_two(exponents.clamp(max=_HIGHEST_TOP)) * 2**8
        return powers.masked_fill_(exponents == _EXPONENT_OF_NAN, torch.nan).unsqueeze(1)

    def _exponents(self) -> Tensor:
        """Int32, shape (256,): what becomes of the blocks' biased exponents."""
        exponents = torch.arange(_EXPONENT_OF_NAN + 1, dtype=torch.int32, device=self._device)
        exponents.masked_fill_(exponents < _LOWEST_TOP, 0)
        return exponents.masked_fill_(exponents > _HIGHEST_TOP, _EXPONENT_OF_NAN)


# A CPU's memory comes page by page, slower than the work that is done in it: a thread keeps its
# scratch, which means nothing between two calls. A device's allocator keeps memory by itself.
_of_thread = threading.local()


def _scratch(numel: int, device: torch.device) -> _Scratch:
    """Return room for the pieces of `numel` values; on a CPU the thread's own, kept for all."""
    size = max((piece.numel for piece in pieces(numel, device)), default=0)
    if device.type != "cpu":
        return _Scratch(size, device)
    kept: _Scratch | None = getattr(_of_thread, "scratch", None)
    if kept is None or kept.numel < size:
        kept = _of_thread.scratch = _Scratch(size, device)
    return kept


def encode_e3m0(values: Tensor, scales: Tensor, write_codes: Callable[[int, Tensor], None]) -> None:
    """Encode fp32 `values` of shape (N,).

    Args:
        values: what is encoded.
        scales: filled: uint8, shape (num_blocks(N),): E + 127, 0 for a block that becomes zero, 255
            for one that becomes NaN.
        write_codes: called with the index of a piece's first value and its codes, uint8 in 0..15,
            shape (n,), good during the call: bit 3 is the sign, bits 0 to 2 are 0 for zero and m
            for 2^(E - 7 + m). In a block that becomes NaN they mean nothing.
    """
    scratch = _scratch(values.numel(), values.device)
    for piece in pieces(values.numel(), values.device):
        room = scratch.room(piece.shape)
        values_BV = values[piece.values].view(piece.shape)
        # a NaN counts as an Inf
        top_B = _largest_bits(values_BV, room).clamp_(max=_EXPONENT_OF_NAN << _MANTISSA_BITS)
        # adding half of the mantissa's range carries into the exponent where 1.5 * 2^k is reached:
        # the exponent of the nearest power of two
        top_B.add_(1 << (_MANTISSA_BITS - 1)).bitwise_right_shift_(_MANTISSA_BITS)
        torch.index_select(scratch.scales, 0, top_B, out=scales[piece.blocks])
        torch.index_select(scratch.factors, 0, top_B, out=room.factor)
        write_codes(piece.values.start, _e3m0_codes(values_BV, room))


def _e3m0_codes(values_BV: Tensor, room: _Room) -> Tensor:
    """Let fp16 do the rounding: 2^(E-6) becomes its least normal number, 2^-14.

    With the sign in bit 15, exponents in bits 10 to 14 and below 2^-14 a linear range, the code m
    of 2^(E-7+m) then stands where fp16 has its exponent: adding half of a mantissa carries into it
    at 1.5 * 2^k, and between 0 and 2^-14 at the middle, as the rounding rule has it.
    """
    torch.mul(values_BV, room.factor, out=room.fp32)
    # sign, exponent and the first bit of the mantissa decide; the conversion would round the rest
    room.bits.bitwise_and_(-1 << (_MANTISSA_BITS - 1))
    room.half.copy_(room.fp32)
    room.half_bits.add_(1 << 9).bitwise_right_shift_(10)
    codes = room.codes
    codes.copy_(room.half_bits.view(-1))  # m, or m - 32 = m + 224 with a sign
    with_sign = torch.sub(codes, 224 - 8, out=room.more_codes)
    return torch.minimum(codes, with_sign, out=codes)  # without a sign `with_sign` is m + 40


def decode_e3m0(
    read_codes: Callable[[int, Tensor], None], scales: Tensor, piece: Piece, out: Tensor
) -> None:
    """Decode one piece of what `encode_e3m0` made codes and scales of.

    Args:
        read_codes: called with the index of a value and an int16 tensor of shape (n,); writes the
            codes of n values from that one on into its bits 12 to 15, and anything below.
        scales: uint8, shape (num_blocks(N),), of all N values.
        piece: which of them.
        out: filled: fp32, shape (n,).
    """
    scratch = _scratch(piece.numel, out.device)
    room = scratch.room(piece.shape)
    read_codes(piece.values.start, room.half_bits.view(-1))
    # s and mmm to bits 15 and 12 to 10: fp16 then reads 0 or 2^(m-15)
    room.half_bits.bitwise_right_shift_(2).bitwise_and_(-0x8000 | 0x1C00)
    room.top.copy_(scales[piece.blocks])
    torch.index_select(scratch.powers, 0, room.top, out=room.factor)
    out.view(piece.shape).copy_(room.half).mul_(room.factor)


def encode_int8(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Encode fp32 `values` of shape (N,).

    Args:
        values: what is encoded.
        codes: filled: int8 in -127..127, shape (N,). In a block with a NaN or an Inf they mean
            nothing.
        scales: filled: fp32, shape (num_blocks(N),); NaN for a block with a NaN or an Inf.
    """
    scratch = _scratch(values.numel(), values.device)
    # by a tensor: a CUDA device would multiply by the rounded reciprocal of a Python number
    limit = torch.full((), 127.0, dtype=torch.float32, device=values.device)
    for piece in pieces(values.numel(), values.device):
        room = scratch.room(piece.shape)
        values_BV = values[piece.values].view(piece.shape)
        largest_B = _largest_bits(values_BV, room).view(torch.float32)
        largest_B.masked_fill_(largest_B < _SMALLEST_LARGEST, 0.0)
        factor_B = (127 / largest_B).nan_to_num_(posinf=0.0)
        scales[piece.blocks] = (largest_B / limit).masked_fill_(largest_B.isinf(), torch.nan)
        torch.mul(values_BV, factor_B.unsqueeze(1), out=room.fp32)
        codes[piece.values].view(piece.shape).copy_(room.fp32.round_())


def decode_int8(codes: Tensor, scales: Tensor, piece: Piece, out: Tensor) -> None:
    """Decode one piece of what `encode_int8` made codes and scales of, into fp32 `out`, (n,)."""
    out_BV = out.view(piece.shape).copy_(codes[piece.values].view(piece.shape))
    out_BV.mul_(scales[piece.blocks].unsqueeze(1))


def _largest_bits(values_BV: Tensor, room: _Room) -> Tensor:
    """Return every block's largest magnitude as fp32 writes it: int32, shape (B,).

    The bits of magnitudes are in the order of their values, with Inf and then NaN above them.
    """
    torch.abs(values_BV, out=room.fp32)
    return torch.amax(room.bits, dim=1, out=room.top)


def _power_of_two(biased_exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 for int32 `biased_exponents` from 1 to 254; 0 for 0."""
    return (biased_exponents << _MANTISSA_BITS).view(torch.float32)
