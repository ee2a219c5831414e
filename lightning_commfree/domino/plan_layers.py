"""Sharded linears around which every rank needs whole activations, as some plans ask.

================  ====================  ===========================  ======================
module            weight of a rank      forward                      backward
================  ====================  ===========================  ======================
`GatheredLinear`  1/t of the outputs    gather of x w                all-reduce of dx
`SplitRowLinear`  1/t of the inputs     all-reduce of (part of x) w  gather of dx
================  ====================  ===========================  ======================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_commfree.domino.group import BACKWARD_TAG, TensorGroup
from lightning_commfree.domino.layers import ColumnLinear, RowLinear, gathered


class _Slice(torch.autograd.Function):
    """This rank's part of the last dimension; the gradient is put together over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size, dim=-1)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = ctx.group.channel.all_gather(grads[0].contiguous(), BACKWARD_TAG).wait()
        return torch.cat(parts.unbind(0), dim=-1), None


class GatheredLinear(ColumnLinear):
    """A column linear whose outputs every rank needs whole, as where heads are normed together."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs, shape (..., out)."""
        return gathered(super().forward(x), self.group)


class SplitRowLinear(RowLinear):
    """A row linear whose input is whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, shape (..., out)."""
        return super().forward(_Slice.apply(x, self.group))  # type: ignore[no-untyped-call]
