"""Codecs for outer gradients: convert fp32 values to a payload of bytes and back.

Every replica, including the sender, decodes the same bytes and sums in fp32 in replica order, so
the global copies remain bit-identical (arXiv:2501.18512, section 2.4). The size of a payload
depends only on the number of values, N.

==========  ============  =====================================================================
wire_dtype  bits a value  rounding
==========  ============  =====================================================================
fp32        32            none
bf16        16            to nearest, ties to even; NaN and Inf are kept
int8        8.125         to nearest in steps of a block's largest magnitude / 127
fp4         4.03          to nearest of zero and seven powers of two with either sign (E3M0)
==========  ============  =====================================================================

Int8 and fp4 have one scale per *block* of consecutive values (`quantize`). Values are processed in
*chunks* of complete blocks, so that intermediate results stay in cache. If numba is installed, CPUs
use `quantize_numba`, which is two to four times faster on one thread and gives the same results.

To use your own codec, pass an object that implements `Codec` as `wire_dtype`. Coarse codecs (1 or 2
bits, top-k) converge only with `Codec.error_feedback`. See `examples/sign_codec.py` for an example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_commfree.comm.bits import lift_nibbles_part, pack_nibbles_part, packed_nibbles_size
from lightning_commfree.comm.compiled import load_loops
from lightning_commfree.diloco import quantize

BLOCK = 256  # values
_CPU_CHUNK = 2**19  # values; 4 MB of workspace: smaller chunks pay more for torch's calls
_DEVICE_CHUNK = 2**25  # few launches; the workspace takes 8 bytes a value


def num_blocks(numel: int) -> int:
    """Return the number of blocks in `numel` values."""
    return -(-numel // BLOCK)


def chunks(numel: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that cover `numel` values, in chunks sized for the device."""
    # a shorter last block is a chunk of its own, so that every chunk has blocks of one size
    step = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < numel:
        yield slice(whole, numel)


@runtime_checkable
class Codec(Protocol):
    """Interface for converting fp32 values to a payload of bytes and back."""

    @property
    def name(self) -> str:
        """Name of the codec, which must be the same on all replicas."""

    @property
    def error_feedback(self) -> bool:
        """Whether to add the rounding error to the fragment's next outer gradient.

        It takes 4 bytes of memory per parameter.
        """

    def num_bytes(self, numel: int) -> int:
        """Return the payload size in bytes for `numel` values."""

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode values into `out`.

        Args:
            values: fp32, shape (N,).
            out: uint8, shape (num_bytes(N),); filled.
            residual: fp32, shape (N,); filled with the rounding error, which is `values` minus the
                decoded `out`. None: not needed.
        """

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Decode a chunk of a payload.

        Args:
            payload: uint8, filled by `encode`.
            numel: N, the number of values in the payload.
            values: the chunk, one of the slices that `chunks` yields.
            out: fp32, shape (values.stop - values.start,); filled.
        """


@dataclass(frozen=True)
class CastCodec:
    """Codec that casts values to another floating-point type."""

    name: str
    dtype: torch.dtype
    error_feedback: bool = False

    def num_bytes(self, numel: int) -> int:
        """Return N times the size of the wire type."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Cast the values to the wire type."""
        out.view(self.dtype).copy_(values)
        _write_residual(self, values, out, residual)

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Cast a chunk back to fp32."""
        _check_size(self, payload, numel)
        out.copy_(payload.view(self.dtype)[values])


@dataclass(frozen=True)
class Int8Codec:
    """Int8 codec. Its payload contains the fp32 scales of all blocks, then one byte per value.

    Args:
        compiled: whether to use `quantize_numba` if numba is installed.
    """

    name: str = "int8"
    compiled: bool = True
    error_feedback: bool = False

    def num_bytes(self, numel: int) -> int:
        """Return one byte per value and four per block."""
        return 4 * num_blocks(numel) + numel

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode block by block."""
        scales, codes = self._split(out, values.numel())
        if loops := self.compiled and _loops(values.device):
            loops.encode_int8(values, codes, scales, BLOCK)
        else:
            for chunk in chunks(values.numel(), values.device):
                blocks, shape = blocks_of(chunk)
                values_BV, codes_BV = (part[chunk].view(shape) for part in (values, codes))
                quantize.encode_int8(values_BV, codes_BV, scales[blocks])
        _write_residual(self, values, out, residual)

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Decode the blocks of a chunk."""
        _check_size(self, payload, numel)
        scales, codes = self._split(payload, numel)
        blocks, shape = blocks_of(values)
        quantize.decode_int8(codes[values].view(shape), scales[blocks], out.view(shape))

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        split = 4 * num_blocks(numel)
        return payload[:split].view(torch.float32), payload[split:].view(torch.int8)


@dataclass(frozen=True)
class Fp4Codec:
    """Fp4 codec. Its payload contains E3M0 codes, two per byte, then a one-byte scale per block.

    Args:
        compiled: whether to use `quantize_numba` if numba is installed.
    """

    name: str = "fp4"
    compiled: bool = True
    error_feedback: bool = False

    def num_bytes(self, numel: int) -> int:
        """Return half a byte per value, rounded up to whole words, and one byte per block."""
        return packed_nibbles_size(numel) + num_blocks(numel)

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode block by block, and pack the codes."""
        packed, scales = self._split(out, values.numel())
        if loops := self.compiled and _loops(values.device):
            loops.encode_e3m0(values, packed, scales, BLOCK)
        else:
            for chunk in chunks(values.numel(), values.device):
                blocks, shape = blocks_of(chunk)
                codes = quantize.encode_e3m0(values[chunk].view(shape), scales[blocks])
                pack_nibbles_part(codes, chunk.start, packed)
        _write_residual(self, values, out, residual)

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Decode the blocks of a chunk."""
        _check_size(self, payload, numel)
        packed, scales = self._split(payload, numel)
        blocks, shape = blocks_of(values)
        if loops := self.compiled and _loops(payload.device):
            loops.decode_e3m0(packed, values.start, scales[blocks], out, BLOCK)
        else:
            lift = partial(lift_nibbles_part, packed, values.start)
            quantize.decode_e3m0(lift, scales[blocks], out.view(shape))

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        split = packed_nibbles_size(numel)
        return payload[:split], payload[split:]


CODECS: dict[str, Codec] = {
    "fp32": CastCodec("fp32", torch.float32),
    "bf16": CastCodec("bf16", torch.bfloat16),
    "int8": Int8Codec(),
    "fp4": Fp4Codec(),
}
"""The built-in codecs, by their names in `wire_dtype`."""


def codec_of(wire_dtype: str | Codec) -> Codec:
    """Return the codec for a `wire_dtype` setting, which is a name or a codec."""
    return CODECS[wire_dtype] if isinstance(wire_dtype, str) else wire_dtype


def decode_all(codec: Codec, payload: Tensor, out: Tensor) -> Tensor:
    """Decode all N values of a payload into `out` (fp32, shape (N,)) and return it."""
    for chunk in chunks(out.numel(), out.device):
        codec.decode(payload, out.numel(), chunk, out[chunk])
    return out


def warm_up(codec: Codec, device: torch.device) -> None:
    """Encode and decode one value, to trigger lazy loading and compilation now."""
    value = torch.zeros(1, dtype=torch.float32, device=device)
    payload = torch.empty(codec.num_bytes(1), dtype=torch.uint8, device=device)
    codec.encode(value, payload)
    decode_all(codec, payload, value)


def blocks_of(chunk: slice) -> tuple[slice, tuple[int, int]]:
    """Return the slice of blocks that a chunk covers, and its shape (blocks, values per block)."""
    blocks = slice(chunk.start // BLOCK, num_blocks(chunk.stop))
    count = blocks.stop - blocks.start
    return blocks, (count, (chunk.stop - chunk.start) // count)


def _check_size(codec: Codec, payload: Tensor, numel: int) -> None:
    assert payload.numel() == codec.num_bytes(numel), "the payload does not have `numel` values"


def _write_residual(codec: Codec, values: Tensor, payload: Tensor, residual: Tensor | None) -> None:
    if residual is not None:
        torch.sub(values, decode_all(codec, payload, residual), out=residual)


def _loops(device: torch.device) -> ModuleType | None:
    """Return `quantize_numba` if it can be used for tensors on `device`, else None."""
    if device.type != "cpu":
        return None
    return load_loops("lightning_commfree.diloco.quantize_numba", "int8 and fp4")
