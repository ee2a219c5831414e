"""Optimizers of the recipes: linear warm-up, cosine decay, weight decay on matrices only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_commfree import DistributedLion
from recipes.configuration.ranges import Fraction, FractionBelowOne

# Lion's momentum averages over about 1 / (1 - beta2) steps. The paper's 0.99 (arXiv:2302.06675)
# means 100, in runs of 10,000 steps and more. In a run of 500 steps that is too long: Lion's loss
# was 4.5 and 6.7 % above that with 10 steps, 2 % of the run, and half as many for beta1, with
# clipped gradients (`python -m benchmarks.lion_quality`).
_MEMORY_SHARE = 0.02  # of the run
_MEMORY_STEPS = (10.0, 100.0)  # shortest: best in a run of 500 steps; longest: the paper's
_LONGEST_BETA1_STEPS = 10.0  # the paper's 0.9

# the default warm-up: 100 steps, but at most a fifth of the run
_WARMUP_STEPS = 100
_WARMUP_SHARE = 0.2

OptimizerFactory = Callable[[nn.Module], OptimizerLRSchedulerConfig]


def adamw_cosine(
    module: nn.Module,
    total_steps: int,
    lr: NonNegativeFloat = 1e-3,
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95),
    weight_decay: NonNegativeFloat = 0.1,
    warmup_steps: NonNegativeInt | None = None,
    final_lr_fraction: Fraction = 0.1,
) -> OptimizerLRSchedulerConfig:
    """Create AdamW, fused on CUDA, and its schedule, as returned by `configure_optimizers`.

    Args:
        module: whose trainable parameters to optimize.
        total_steps: optimizer steps of the whole run.
        lr: maximum learning rate, reached after warm-up.
        betas: of AdamW.
        weight_decay: of matrices and embeddings only.
        warmup_steps: as for `warmup_cosine`.
        final_lr_fraction: as for `warmup_cosine`.

    Raises:
        ValueError: from `warmup_cosine`.
    """
    groups = decay_groups(module.parameters(), weight_decay)
    optimizer = fuse_on_cuda(torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1])))
    return warmup_cosine(optimizer, total_steps, warmup_steps, final_lr_fraction)


def lion_cosine(
    module: nn.Module,
    total_steps: int,
    lr: NonNegativeFloat = 2.5e-4,
    betas: tuple[FractionBelowOne, FractionBelowOne] | None = None,
    weight_decay: NonNegativeFloat = 0.4,
    warmup_steps: NonNegativeInt | None = None,
    final_lr_fraction: Fraction = 0.1,
    ns_steps: NonNegativeInt = 0,
) -> OptimizerLRSchedulerConfig:
    """Create `DistributedLion` and its schedule, as returned by `configure_optimizers`.

    The defaults are those of `adamw_cosine` with a quarter of the learning rate and four times the
    weight decay, so that their product, the decay per step, stays the same.

    Args:
        module: whose trainable parameters to optimize.
        total_steps: optimizer steps of the whole run.
        lr: maximum learning rate, reached after warm-up.
        betas: of `DistributedLion`; None: from `lion_betas`.
        weight_decay: of matrices and embeddings only.
        warmup_steps: as for `warmup_cosine`.
        final_lr_fraction: as for `warmup_cosine`.
        ns_steps: of `DistributedLion`, for the matrices of hidden layers only.

    Raises:
        ValueError: from `warmup_cosine` or `DistributedLion`.
    """
    matrices = hidden_matrices(module) if ns_steps else []
    taken = set(matrices)
    groups = decay_groups([p for p in module.parameters() if p not in taken], weight_decay)
    if matrices:
        group = {"params": matrices, "weight_decay": weight_decay, "ns_steps": ns_steps}
        groups.append(group)
    betas = lion_betas(total_steps) if betas is None else (betas[0], betas[1])
    optimizer = DistributedLion(groups, lr=lr, betas=betas)
    return warmup_cosine(optimizer, total_steps, warmup_steps, final_lr_fraction)


def lion_betas(total_steps: int) -> tuple[float, float]:
    """Return Lion's betas for a run of `total_steps` optimizer steps.

    beta2 averages over 2 % of the run, but at least 10 and at most 100 steps; beta1 over half as
    many, but at most 10. So runs of 500 steps have (0.8, 0.9), and from 5,000 on the paper's
    (0.9, 0.99). Measured at 500 steps; interpolated in between.
    """
    shortest, longest = _MEMORY_STEPS
    steps = min(max(_MEMORY_SHARE * total_steps, shortest), longest)
    return round(1 - 1 / min(steps / 2, _LONGEST_BETA1_STEPS), 4), round(1 - 1 / steps, 4)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters with two dimensions that are in hidden layers.

    Left out are `nn.Embedding`s and the output heads of models of transformers, which they name in
    `get_output_embeddings`. A head of any other model is taken for a hidden layer.
    """
    parts = list(module.modules())
    finders = [getattr(part, "get_output_embeddings", None) for part in parts]
    heads = [find() for find in finders if callable(find)]
    ends = [part for part in parts if isinstance(part, nn.Embedding)]
    ends += [head for head in heads if head is not None]
    outside = {p for end in ends for p in end.parameters()}
    trained = [p for p in module.parameters() if p.requires_grad and p.ndim == 2]
    return [p for p in trained if p not in outside]


def fuse_on_cuda(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """Let AdamW take fused steps if all its parameters are on CUDA devices; return it.

    A fused step reads and writes 28 bytes per parameter, torch's default on CUDA 56.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if parameters and all(p.device.type == "cuda" for p in parameters):
        # Not by the constructor's `fused`: it also lets the step unscale fp16 gradients, and before
        # such a step Lightning refuses to clip gradients, in bf16 too.
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of the trainable parameters, with and without weight decay.

    Those with two dimensions or more (matrices, embeddings) decay, gains and biases do not.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int | None, final_lr_fraction: float
) -> OptimizerLRSchedulerConfig:
    """Return an optimizer with a warm-up and cosine schedule that advances every step.

    Args:
        optimizer: its learning rate is the maximum, reached after warm-up.
        total_steps: optimizer steps of the whole run; the cosine ends there.
        warmup_steps: steps in which the learning rate grows linearly; None: 100, or a fifth of a
            run of less than 500.
        final_lr_fraction: final learning rate as a fraction of the maximum.

    Raises:
        ValueError: the run has no length, or warm-up is not shorter than it.
    """
    if total_steps < 1:
        raise ValueError(
            f"total_steps={total_steps}: the cosine needs the length of the run. Set"
            " `trainer.max_steps` to a positive number of optimizer steps."
        )
    if warmup_steps is None:
        warmup_steps = min(_WARMUP_STEPS, int(_WARMUP_SHARE * total_steps))
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be at least 0 and less than the run's {total_steps}"
            " steps. Lower `optimizer.warmup_steps`, leave it out, or raise `trainer.max_steps`."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return final_lr_fraction + (1 - final_lr_fraction) * cosine

    scheduler = LambdaLR(optimizer, factor)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"},
    }
