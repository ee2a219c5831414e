"""What becomes of gradients between backward and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.grad_scaler import AgreedGradScaler

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


def agree_on_overflow(precision: Precision, channel: Channel) -> None:
    """Make all ranks skip an optimizer step that one of them must skip, with fp16 scaling."""
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        precision.scaler = AgreedGradScaler(precision.scaler, channel)
