"""AdamW with linear warm-up and cosine decay, weight decay on matrices only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

OptimizerFactory = Callable[[nn.Module], OptimizerLRSchedulerConfig]


def adamw_cosine(
    module: nn.Module,
    total_steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    warmup_steps: int = 100,
    final_lr_fraction: float = 0.1,
) -> OptimizerLRSchedulerConfig:
    """Return optimizer and schedule as `configure_optimizers` returns them.

    Args:
        module: all its trainable parameters are optimized; those with two dimensions or more
            (matrices, embeddings) decay, gains and biases do not.
        total_steps: optimizer steps of the whole run; the cosine ends there.
        lr: the highest learning rate, reached after warm-up.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup_steps: steps in which the learning rate grows linearly.
        final_lr_fraction: of `lr`, at the end.

    Raises:
        ValueError: the run has no length, or warm-up is longer than it.
    """
    if total_steps < 1:
        raise ValueError(
            f"total_steps={total_steps}: the cosine needs the length of the run. Set"
            " `trainer.max_steps` to a positive number of optimizer steps."
        )
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be at least 0 and less than the run's {total_steps}"
            " steps. Lower `optimizer.warmup_steps` or raise `trainer.max_steps`."
        )
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return final_lr_fraction + (1 - final_lr_fraction) * cosine

    scheduler = LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
