"""What an outer gradient looks like on the wire: fp32 values to a payload of bytes and back.

A replica encodes its outer gradient once; every replica, the sender too, decodes the same bytes and
sums in fp32 in the order of the ranks, so that the global copies stay bit-identical
(arXiv:2501.18512, section 2.4). A payload of N values has the same size on all replicas.

==========  ============  =====================================================================
wire_dtype  bits a value  rounding
==========  ============  =====================================================================
fp32        32            none
bf16        16            to nearest, ties to even; NaN and Inf stay what they are
int8        8.125         to nearest in steps of a block's largest magnitude / 127
fp4         4.03          to nearest of zero and seven powers of two with either sign (E3M0)
==========  ============  =====================================================================

Int8 and fp4 have *blocks* of consecutive values, with a scale for each. Values are worked on in
*chunks* of whole blocks, so that intermediate results stay in a cache.

`quantize` says what the blocks of int8 and fp4 are, and what becomes of zeros, NaN and Inf there.
Where numba is installed, a CPU encodes them, and decodes fp4, in the compiled loops of
`quantize_numba`: the same values (a NaN block may hold other codes), two to four times as fast, one
thread against one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_commfree.comm.bits import lift_nibbles_part, pack_nibbles_part, packed_nibbles_size
from lightning_commfree.diloco import quantize

_log = logging.getLogger(__name__)

BLOCK = 256  # values
_CPU_CHUNK = 2**19  # values; 4 MB of workspace: smaller chunks pay more for torch's calls
_DEVICE_CHUNK = 2**25  # few launches; the workspace takes 8 bytes a value


class Chunk(NamedTuple):
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


def chunks(numel: int, device: torch.device) -> Iterator[Chunk]:
    """Cut `numel` values into chunks of a size that suits the device, in ascending order."""
    step = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield Chunk(slice(start, stop), slice(start // BLOCK, stop // BLOCK))
    if whole < numel:
        yield Chunk(slice(whole, numel), slice(whole // BLOCK, whole // BLOCK + 1))


class WireFormat(Protocol):
    """Fp32 values to a payload of bytes and back."""

    def num_bytes(self, numel: int) -> int:
        """Return the size of the payload of `numel` values."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write fp32 `values`, shape (N,), into `out`: uint8, shape (num_bytes(N),)."""

    def decode_chunk(self, payload: Tensor, numel: int, chunk: Chunk, out: Tensor) -> None:
        """Write one chunk of the `numel` values of a payload into `out`: fp32, shape (n,)."""


@dataclass(frozen=True)
class CastFormat:
    """The values in another floating-point type."""

    dtype: torch.dtype

    def num_bytes(self, numel: int) -> int:
        """See `WireFormat`."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        """See `WireFormat`."""
        out.view(self.dtype).copy_(values)

    def decode_chunk(self, payload: Tensor, numel: int, chunk: Chunk, out: Tensor) -> None:
        """See `WireFormat`."""
        assert payload.numel() == self.num_bytes(numel), "a payload has one size"
        out.copy_(payload.view(self.dtype)[chunk.values])


@dataclass(frozen=True)
class Int8Format:
    """The blocks' scales in fp32, then an int8 per value.

    Args:
        compiled: False: never `quantize_numba`, whatever is installed.
    """

    compiled: bool = True

    def num_bytes(self, numel: int) -> int:
        """See `WireFormat`."""
        return self._scale_bytes(numel) + numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        """See `WireFormat`."""
        split = self._scale_bytes(values.numel())
        scales, codes = out[:split].view(torch.float32), out[split:].view(torch.int8)
        if loops := self.compiled and _loops(values.device):
            loops.encode_int8(values, codes, scales, BLOCK)
            return

        for chunk in chunks(values.numel(), values.device):
            values_BV, codes_BV = (part[chunk.values].view(chunk.shape) for part in (values, codes))
            quantize.encode_int8(values_BV, codes_BV, scales[chunk.blocks])

    def decode_chunk(self, payload: Tensor, numel: int, chunk: Chunk, out: Tensor) -> None:
        """See `WireFormat`."""
        assert payload.numel() == self.num_bytes(numel), "a payload has one size"
        split = self._scale_bytes(numel)
        scales, codes = payload[:split].view(torch.float32), payload[split:].view(torch.int8)
        codes_BV = codes[chunk.values].view(chunk.shape)
        quantize.decode_int8(codes_BV, scales[chunk.blocks], out.view(chunk.shape))

    def _scale_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel)


@dataclass(frozen=True)
class Fp4Format:
    """Two E3M0 codes a byte, then the blocks' scales, a byte each.

    Args:
        compiled: False: never `quantize_numba`, whatever is installed.
    """

    compiled: bool = True

    def num_bytes(self, numel: int) -> int:
        """See `WireFormat`."""
        return _packed_bytes(numel) + num_blocks(numel)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """See `WireFormat`."""
        packed, scales = _split_before_scales(out, values.numel())
        if loops := self.compiled and _loops(values.device):
            loops.encode_e3m0(values, packed, scales, BLOCK)
            return

        for chunk in chunks(values.numel(), values.device):
            values_BV = values[chunk.values].view(chunk.shape)
            codes = quantize.encode_e3m0(values_BV, scales[chunk.blocks])
            pack_nibbles_part(codes, chunk.values.start, packed)

    def decode_chunk(self, payload: Tensor, numel: int, chunk: Chunk, out: Tensor) -> None:
        """See `WireFormat`."""
        assert payload.numel() == self.num_bytes(numel), "a payload has one size"
        packed, scales = _split_before_scales(payload, numel)
        start = chunk.values.start
        if loops := self.compiled and _loops(payload.device):
            loops.decode_e3m0(packed, start, scales[chunk.blocks], out, BLOCK)
            return

        lift = partial(lift_nibbles_part, packed, start)
        quantize.decode_e3m0(lift, scales[chunk.blocks], out.view(chunk.shape))


def _split_before_scales(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the packed codes and the scales, a byte for each block."""
    split = _packed_bytes(numel)
    return payload[:split], payload[split:]


@cache  # asked for at every chunk of every message
def _packed_bytes(numel: int) -> int:
    return packed_nibbles_size(numel)


def decode(wire: WireFormat, payload: Tensor, out: Tensor) -> Tensor:
    """Write all values of a payload into `out`, fp32, shape (N,), and return it."""
    for chunk in chunks(out.numel(), out.device):
        wire.decode_chunk(payload, out.numel(), chunk, out[chunk.values])
    return out


def warm_up(wire: WireFormat, device: torch.device) -> None:
    """Encode and decode one value: what the first time loads or compiles is there from then on."""
    value = torch.zeros(1, dtype=torch.float32, device=device)
    payload = torch.empty(wire.num_bytes(1), dtype=torch.uint8, device=device)
    wire.encode(value, payload)
    decode(wire, payload, value)


def _loops(device: torch.device) -> ModuleType | None:
    """Return `quantize_numba` where it is of use; None where torch operations have to do."""
    return _numba_loops() if device.type == "cpu" else None


@cache
def _numba_loops() -> ModuleType | None:
    slower = "int8 and fp4 take torch operations on a CPU: slower, with the same result"
    try:
        from lightning_commfree.diloco import quantize_numba

        quantize_numba.try_out()
    except Exception as error:  # noqa: BLE001 - what only makes things faster must not end a fit
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            how = "pip install 'lightning-commfree[numba]'"
            _log.info("numba is not installed (%s): %s.", how, slower)
        else:  # a numpy that it does not know yet, a library that does not load, a damaged cache
            text = "numba cannot be used (%s: %s): %s. It keeps compiled loops in %s, if it can."
            folder = Path(__file__).with_name("__pycache__")
            _log.warning(text, type(error).__name__, error, slower, folder)
        return None
    return quantize_numba


WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": CastFormat(torch.float32),
    "bf16": CastFormat(torch.bfloat16),
    "int8": Int8Format(),
    "fp4": Fp4Format(),
}
"""What may travel, by the name in `wire_dtype`."""
