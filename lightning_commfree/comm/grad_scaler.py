"""Gradient scaling in fp16 where all ranks must skip the same steps."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel

OVERFLOW_TAG = "overflow"


class AgreedGradScaler(torch.amp.GradScaler):
    """A scaler whose ranks skip a step together.

    torch's looks at a rank's own gradients: one rank would skip its step, and the others would wait
    for what it sends in that step.

    Args:
        scaler: whose place it takes, with its scale and settings.
        channel: over the ranks.
    """

    def __init__(self, scaler: torch.amp.GradScaler, channel: Channel) -> None:
        super().__init__(
            scaler._device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
        self._channel = channel

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, and agree on whether some rank has found NaN or Inf."""
        super().unscale_(optimizer)

        found_by_device = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found in found_by_device.values():
            total = self._channel.all_reduce(
                found.to(self._channel.device, copy=True), OVERFLOW_TAG
            )
            found.copy_(total.wait())
