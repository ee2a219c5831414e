"""Codecs for outer gradients: convert fp32 values to a payload of bytes and back.

All replicas, including the sender, decode the same bytes, and values are summed in fp32 in replica
order, so the global copies remain bit-identical (arXiv:2501.18512, section 2.4). The size of a
payload depends only on the number of values, N.

==========  ==============  ===================================================================
wire_dtype  bits per value  rounding
==========  ==============  ===================================================================
fp32        32              none
bf16        16              to nearest, ties to even; NaN and Inf are preserved
int8        8.125           to the nearest multiple of the block's largest magnitude / 127
fp4         4.03            to the nearest of zero and seven powers of two of either sign (E3M0)
int2        2.06            to one of four levels per block; error feedback
==========  ==============  ===================================================================

Int8, fp4 and int2 have one scale per *block* of consecutive values (`quantize`). Values are
processed in *chunks* of complete blocks, so that intermediate results stay in cache. If numba is
installed, `quantize_numba` encodes all three on CPUs and decodes fp4 and int2: two to four times
faster on one thread, with the same results for finite values.

*Error feedback* (arXiv:1901.09847) keeps a codec's rounding error, the *residual*, in the replica's
own state and adds it, times a weight, to the fragment's next outer gradient. The larger the outer
momentum, the lower this weight must be, because momentum repeats a residual in every later step.
With outer learning rate 0.4 and momentum 0.9, int2 diverges at weights of 0.9
and above (`tests/diloco/test_error_feedback.py`). So the default weight is 0.5. Without outer
momentum, weights from 0.95 to 1 are best.

To use your own codec, pass an object that implements `Codec` as `wire_dtype`, as in
`examples/sign_codec.py` and `examples/topk_codec.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_commfree.comm.bits import (
    lift_nibbles_part,
    pack_codes_part,
    packed_size,
    unpack_codes_part,
)
from lightning_commfree.comm.compiled import load_loops
from lightning_commfree.diloco import quantize

BLOCK = 256  # values
_CPU_CHUNK = 2**19  # values; 4 MB of workspace: smaller chunks spend more time on call overhead
_DEVICE_CHUNK = 2**25  # values; few launches, and the workspace uses 8 bytes per value
_FEEDBACK = 0.5  # stable with the default outer optimizer, and with twice its learning rate


def num_blocks(numel: int) -> int:
    """Return the number of blocks in `numel` values; the last block may be shorter."""
    return -(-numel // BLOCK)


def chunks(numel: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that split `numel` values into chunks of whole blocks, sized for the device."""
    # a shorter last block gets its own chunk, so that all blocks in a chunk have the same size
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
    def error_feedback(self) -> float:
        """Weight of the rounding error in the fragment's next outer gradient; 0 discards the error.

        Between 0 and 1; with the default outer optimizer well below 0.9 (see above). Keeping the
        error uses 4 bytes of memory per parameter.
        """

    def num_bytes(self, numel: int) -> int:
        """Return the payload size in bytes for `numel` values."""

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode values into `out`, and write the rounding error to `residual`, if given.

        Args:
            values: fp32, shape (N,).
            out: uint8, shape (num_bytes(N),); receives the payload.
            residual: fp32, shape (N,); receives the rounding error, which is `values` minus the
                decoded `out`. None if it is not needed.
        """

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Decode the slice `values` of a payload of `numel` values into `out`.

        Args:
            payload: uint8, as written by `encode`.
            numel: N, the number of values in the payload.
            values: the chunk, one of the slices that `chunks` yields.
            out: fp32, shape (values.stop - values.start,); receives the decoded values.
        """


@dataclass(frozen=True)
class CastCodec:
    """Codec that casts values to another floating-point type."""

    name: str
    dtype: torch.dtype
    error_feedback: float = 0.0

    def num_bytes(self, numel: int) -> int:
        """Return the payload size in bytes: `numel` times the size of the wire dtype."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Cast the values to the wire dtype into `out`; `residual` receives the rounding error."""
        out.view(self.dtype).copy_(values)
        _write_residual(self, values, out, residual)

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Cast the slice `values` of a payload back to fp32, into `out`."""
        _check_size(self, payload, numel)
        out.copy_(payload.view(self.dtype)[values])


@dataclass(frozen=True)
class Int8Codec:
    """Int8 codec. Its payload contains the fp32 scales of all blocks, then one byte per value."""

    name: str = "int8"
    compiled: bool = True  # use the faster `quantize_numba` if numba is installed
    error_feedback: float = 0.0

    def num_bytes(self, numel: int) -> int:
        """Return the payload size in bytes: one byte per value and four bytes per block."""
        return 4 * num_blocks(numel) + numel

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Quantize each block to int8 with its own scale; `residual` receives the error."""
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
        """Decode the blocks in the slice `values` of a payload into `out`."""
        _check_size(self, payload, numel)
        scales, codes = self._split(payload, numel)
        blocks, shape = blocks_of(values)
        quantize.decode_int8(codes[values].view(shape), scales[blocks], out.view(shape))

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of a payload's scales and of its codes."""
        split = 4 * num_blocks(numel)
        return payload[:split].view(torch.float32), payload[split:].view(torch.int8)


@dataclass(frozen=True)
class Fp4Codec:
    """Fp4 codec. Its payload contains E3M0 codes, two per byte, then a one-byte scale per block."""

    name: str = "fp4"
    compiled: bool = True  # use the faster `quantize_numba` if numba is installed
    error_feedback: float = 0.0

    def num_bytes(self, numel: int) -> int:
        """Return the payload size in bytes: 1 byte per block, and 4 bits per value, padded."""
        return packed_size(numel, 4) + num_blocks(numel)

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Quantize each block to E3M0, two codes per byte; `residual` receives the rounding error.

        Each block has its own scale.
        """
        packed, scales = self._split(out, values.numel())
        if loops := self.compiled and _loops(values.device):
            loops.encode_e3m0(values, packed, scales, BLOCK)
        else:
            for chunk in chunks(values.numel(), values.device):
                blocks, shape = blocks_of(chunk)
                codes = quantize.encode_e3m0(values[chunk].view(shape), scales[blocks])
                pack_codes_part(codes, 4, chunk.start, packed)
        _write_residual(self, values, out, residual)

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Decode the blocks in the slice `values` of a payload into `out`."""
        _check_size(self, payload, numel)
        packed, scales = self._split(payload, numel)
        blocks, shape = blocks_of(values)
        if loops := self.compiled and _loops(payload.device):
            loops.decode_e3m0(packed, values.start, scales[blocks], out, BLOCK)
        else:
            unpack_codes = partial(lift_nibbles_part, packed, values.start)
            quantize.decode_e3m0(unpack_codes, scales[blocks], out.view(shape))

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of a payload's packed codes and of its scales."""
        split = packed_size(numel, 4)
        return payload[:split], payload[split:]


@dataclass(frozen=True)
class Int2Codec:
    """Int2 codec. Its payload contains the bf16 scales of all blocks, then codes, four per byte.

    Args:
        compiled: whether to use the faster `quantize_numba` if numba is installed.
        error_feedback: weight of the rounding error in the fragment's next outer gradient; 0
            discards the error.
    """

    compiled: bool = True
    error_feedback: float = _FEEDBACK

    @property
    def name(self) -> str:
        """Name of the codec, with the error feedback weight; must be the same on all replicas."""
        return f"int2(error_feedback={self.error_feedback})"

    def num_bytes(self, numel: int) -> int:
        """Return the payload size in bytes: 2 bytes per block, and 2 bits per value, padded."""
        return 2 * num_blocks(numel) + packed_size(numel, 2)

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Quantize each block to two bits, four codes per byte; `residual` receives the error.

        Each block has its own scale.
        """
        scales, packed = self._split(out, values.numel())
        if loops := self.compiled and _loops(values.device):
            loops.encode_int2(values, packed, scales, BLOCK)
        else:
            for chunk in chunks(values.numel(), values.device):
                blocks, shape = blocks_of(chunk)
                values_BV = values[chunk].view(shape)
                codes = quantize.encode_int2(values_BV, scales[blocks])
                pack_codes_part(codes, 2, chunk.start, packed)
        _write_residual(self, values, out, residual)

    def decode(self, payload: Tensor, numel: int, values: slice, out: Tensor) -> None:
        """Decode the blocks in the slice `values` of a payload into `out`."""
        _check_size(self, payload, numel)
        scales, packed = self._split(payload, numel)
        blocks, shape = blocks_of(values)
        if loops := self.compiled and _loops(payload.device):
            loops.decode_int2(packed, values.start, scales[blocks], out, BLOCK)
        else:
            codes = torch.empty(out.shape, dtype=torch.uint8, device=out.device)
            unpack_codes_part(packed, 2, values.start, codes)
            quantize.decode_int2(codes.view(shape), scales[blocks], out.view(shape))

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views of a payload's scales and of its packed codes."""
        split = 2 * num_blocks(numel)
        return payload[:split].view(torch.bfloat16), payload[split:]


CODECS: dict[str, Codec] = {
    "fp32": CastCodec("fp32", torch.float32),
    "bf16": CastCodec("bf16", torch.bfloat16),
    "int8": Int8Codec(),
    "fp4": Fp4Codec(),
    "int2": Int2Codec(),
}
"""The built-in codecs, by their names in `wire_dtype`."""


def codec_of(wire_dtype: str | Codec) -> Codec:
    """Return the codec that `wire_dtype` specifies, by name or as a codec object."""
    return CODECS[wire_dtype] if isinstance(wire_dtype, str) else wire_dtype


def decode_all(codec: Codec, payload: Tensor, out: Tensor) -> Tensor:
    """Decode all N values of a payload into `out` (fp32, shape (N,)) and return it."""
    for chunk in chunks(out.numel(), out.device):
        codec.decode(payload, out.numel(), chunk, out[chunk])
    return out


def warm_up(codec: Codec, device: torch.device) -> None:
    """Encode and decode one value, so that lazy loading and compilation do not delay training."""
    value = torch.zeros(1, dtype=torch.float32, device=device)
    payload = torch.empty(codec.num_bytes(1), dtype=torch.uint8, device=device)
    codec.encode(value, payload)
    decode_all(codec, payload, value)


def blocks_of(chunk: slice) -> tuple[slice, tuple[int, int]]:
    """Return the slice of a chunk's blocks, and its shape (number of blocks, values per block)."""
    blocks = slice(chunk.start // BLOCK, num_blocks(chunk.stop))
    count = blocks.stop - blocks.start
    return blocks, (count, (chunk.stop - chunk.start) // count)


def _check_size(codec: Codec, payload: Tensor, numel: int) -> None:
    assert payload.numel() == codec.num_bytes(numel), "the payload does not have `numel` values"


def _write_residual(codec: Codec, values: Tensor, payload: Tensor, residual: Tensor | None) -> None:
    """Write `values` minus the decoded payload to `residual`, unless it is None."""
    if residual is not None:
        torch.sub(values, decode_all(codec, payload, residual), out=residual)


def _loops(device: torch.device) -> ModuleType | None:
    """Return the module `quantize_numba` if it works for tensors on `device`, else None."""
    if device.type != "cpu":
        return None
    return load_loops("lightning_commfree.diloco.quantize_numba", "int8, fp4 and int2")
