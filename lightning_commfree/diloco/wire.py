"""What an outer gradient looks like on the wire: fp32 values to bytes and back.

A replica encodes its outer gradient once; every replica, the sender too, decodes the same bytes and
sums in fp32 in the order of the ranks, so that the global copies stay bit-identical
(arXiv:2501.18512, section 2.4). A payload has the same size on all replicas: `num_bytes(numel)`.

==========  ================  ==========================================================
wire_dtype  bytes a value     rounding
==========  ================  ==========================================================
fp32        4                 none
bf16        2                 to the nearest, ties to even; NaN and Inf stay what they are
==========  ================  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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
    """Encodes by a cast to `dtype`."""

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


WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": CastFormat(torch.float32),
    "bf16": CastFormat(torch.bfloat16),
}
