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

`quantize` says what the blocks of int8 and fp4 are, and what becomes of zeros, NaN and Inf there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_commfree.comm.bits import pack_nibbles, packed_nibbles_size, unpack_nibbles
from lightning_commfree.diloco import quantize


class WireFormat(Protocol):
    """Fp32 values to a payload of bytes and back."""

    def num_bytes(self, numel: int) -> int:
        """Return the size of the payload of `numel` values."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write fp32 `values`, shape (N,), into `out`: uint8, shape (num_bytes(N),)."""

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Turn a payload back into fp32 values of shape (numel,); they may alias it."""


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

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """See `WireFormat`."""
        assert payload.numel() == self.num_bytes(numel), "a payload has one size"
        return payload.view(self.dtype).to(torch.float32)


class Int8Format:
    """The blocks' scales in fp32, then an int8 per value."""

    def num_bytes(self, numel: int) -> int:
        """See `WireFormat`."""
        return self._scale_bytes(numel) + numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        """See `WireFormat`."""
        codes, scales = quantize.encode_int8(values)
        split = self._scale_bytes(values.numel())
        out[:split].view(torch.float32).copy_(scales)
        out[split:].view(torch.int8).copy_(codes)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """See `WireFormat`."""
        split = self._scale_bytes(numel)
        scales = payload[:split].view(torch.float32)
        return quantize.decode_int8(payload[split:].view(torch.int8), scales)

    def _scale_bytes(self, numel: int) -> int:
        return 4 * quantize.num_blocks(numel)


class Fp4Format:
    """Two E3M0 codes a byte, then the blocks' scales, a byte each."""

    def num_bytes(self, numel: int) -> int:
        """See `WireFormat`."""
        return packed_nibbles_size(numel) + quantize.num_blocks(numel)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """See `WireFormat`."""
        codes, scales = quantize.encode_e3m0(values)
        split = packed_nibbles_size(values.numel())
        pack_nibbles(codes, out=out[:split])
        out[split:].copy_(scales)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """See `WireFormat`."""
        split = packed_nibbles_size(numel)
        codes = unpack_nibbles(payload[:split], numel)
        return quantize.decode_e3m0(codes, payload[split:])


WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": CastFormat(torch.float32),
    "bf16": CastFormat(torch.bfloat16),
    "int8": Int8Format(),
    "fp4": Fp4Format(),
}
