"""What becomes of gradients between backward and step, and of buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel

OVERFLOW_TAG = "overflow"
_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def why_gradients_change(
    trainer: pl.Trainer, module: pl.LightningModule, precision: Precision
) -> list[str]:
    """Return the reasons for which gradients may change between backward and optimizer step."""
    reasons = []
    if trainer.gradient_clip_val:
        reasons.append("`gradient_clip_val` is set")
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        reasons.append("fp16 scaling is undone after backward")
    reasons += _overridden(module, pl.LightningModule, (*_HOOKS, "configure_gradient_clipping"))
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        reasons += _overridden(callback, pl.Callback, _HOOKS)
    return reasons


def _overridden(owner: Any, parent: type, hooks: Sequence[str]) -> list[str]:
    name = type(owner).__name__
    return [f"`{name}` overrides `{hook}`" for hook in hooks if is_overridden(hook, owner, parent)]


class AgreedGradScaler(torch.amp.GradScaler):
    """A scaler whose ranks skip a step together.

    Lightning's looks at a rank's own gradients: one rank would skip its step and the others would
    wait for its vote.

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


def agree_on_overflow(precision: Precision, channel: Channel) -> None:
    """Make all ranks skip an optimizer step that one of them must skip, with fp16 scaling."""
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        precision.scaler = AgreedGradScaler(precision.scaler, channel)


def averaged_buffers(
    module: nn.Module, channel: Channel, tag: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a module's floating-point buffers of a checkpoint with their means over the ranks.

    The sums run in the order of the ranks, in fp32 at least, so the means are bit-identical on all
    of them. What all ranks hold is its own mean, to the last bit and where a sum would overflow.
    """
    kept = module.state_dict(keep_vars=True)
    buffers = [
        buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.numel() and name in kept
    ]
    if not buffers:
        return
    least = torch.zeros(0, dtype=torch.float32, device=channel.device)
    flat = torch.cat([least, *(b.detach().reshape(-1).to(channel.device) for b in buffers)])
    rows = channel.all_gather(flat, tag).wait()
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    sizes = [buffer.numel() for buffer in buffers]
    same = (rows == rows[0]).all(dim=0)
    means = torch.split(torch.where(same, rows[0], total / channel.size), sizes)
    for buffer, mean in zip(buffers, means, strict=True):
        yield buffer, mean.view(buffer.shape)
