"""Simulation of n Distributed Lion workers in one process, and a training run with them.

The result of a vote depends on the workers' gradients only, so the loss needs no real
communication. W: workers, N: values in a parameter group. Runs are made here and not in `__main__`,
which the processes of the pool cannot import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.common.pretraining import Config, batches, composed
from benchmarks.lion_quality.grid import Run
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.optimizer import decay_groups, lion_betas, warmup_cosine
from recipes.training.pretraining import build_data, build_module


class SimulatedLion(Optimizer):
    """`DistributedLion` for n workers on one set of fp32 parameters.

    For each worker: write its gradients to the parameters' `grad` and call `cast`. Then call `step`
    once. The result is bit for bit that of n processes.

    Args:
        params: as for any optimizer; "lr", "betas" and "weight_decay" of a group are read at every
            step.
        lr: learning rate.
        betas: of direction and momentum.
        workers: number of workers.

    Attributes:
        momenta_WN: per group, fp32: the momentum of each worker, concatenated over parameters.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], workers: int) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        sizes = [sum(p.numel() for p in group["params"]) for group in self.param_groups]
        self.momenta_WN = [torch.zeros(workers, size) for size in sizes]
        self._votes_N = [torch.zeros(size) for size in sizes]  # exact: sums of integers

    @torch.no_grad()
    def cast(self, worker: int) -> None:
        """Add a worker's votes and update its momentum.

        Raises:
            FloatingPointError: its gradient contains NaN or Inf.
        """
        kept = zip(self.param_groups, self.momenta_WN, self._votes_N, strict=True)
        for group, momenta_WN, votes_N in kept:
            b1, b2 = group["betas"]
            gradient_N = _flat([p.grad for p in group["params"]])
            if not gradient_N.isfinite().all():
                raise FloatingPointError(f"The gradient of worker {worker} contains NaN or Inf.")
            momentum_N = momenta_WN[worker]
            votes_N += torch.sign(momentum_N * b1 + gradient_N * (1 - b1))
            momentum_N.mul_(b2).add_(gradient_N * (1 - b2))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by the votes cast since the last step."""
        assert closure is None, "gradients are passed by `cast`"
        for group, votes_N in zip(self.param_groups, self._votes_N, strict=True):
            delta_N = torch.sign(votes_N)
            sizes = [p.numel() for p in group["params"]]
            for p, delta in zip(group["params"], delta_N.split(sizes), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(delta.view(p.shape) * group["lr"])
            votes_N.zero_()


def simulated_lion_cosine(
    module: nn.Module, knobs: Config, workers: int
) -> OptimizerLRSchedulerConfig:
    """Return `SimulatedLion` with the schedule of `recipes.training.optimizer.lion_cosine`.

    Args:
        module: whose trainable parameters to optimize.
        knobs: values of `conf/optimizer/distributed_lion.yaml`.
        workers: passed to `SimulatedLion`.
    """
    groups = decay_groups(module.parameters(), knobs["weight_decay"])
    b1, b2 = knobs["betas"] or lion_betas(knobs["total_steps"])
    optimizer = SimulatedLion(groups, knobs["lr"], (b1, b2), workers)
    return warmup_cosine(
        optimizer, knobs["total_steps"], knobs["warmup_steps"], knobs["final_lr_fraction"]
    )


def take_step(
    module: LanguageModel,
    made: OptimizerLRSchedulerConfig,
    batch: Tensor,
    workers: int,
    clip: float | None = None,
) -> None:
    """Take one optimizer step with a global batch.

    Args:
        module: the model.
        made: its optimizer and schedule: `SimulatedLion`, or with one worker any optimizer, which
            gets the gradient of the whole batch.
        batch: int64, shape (blocks of all workers, block_size + 1). Worker w takes blocks w, w + n,
            and so on, like `DistributedSampler`.
        workers: number of equal parts of the batch.
        clip: largest norm of a worker's gradient; None: no clipping.
    """
    optimizer, schedule = made["optimizer"], cast(LRSchedulerConfigType, made["lr_scheduler"])
    assert len(batch) % workers == 0, "equal parts, because all votes have the same weight"
    for worker in range(workers):
        optimizer.zero_grad()
        module.loss(batch[worker::workers]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        if isinstance(optimizer, SimulatedLion):
            optimizer.cast(worker)
    optimizer.step()
    schedule["scheduler"].step()


def train(config: Config, workers: int) -> float:
    """Train a model from its seed and return its validation loss in nats per token.

    Args:
        config: of `recipes.pretrain`, for one rank with the global batch. Of the Trainer, only
            `max_steps` and `gradient_clip_val` are used.
        workers: number of voters; 0: the configured optimizer takes the mean gradient.

    Raises:
        FloatingPointError: the run has diverged.
    """
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    made: Any
    if workers:
        made = simulated_lion_cosine(module, config["optimizer"], workers)
    else:
        made = module.configure_optimizers()
    trainer = config["trainer"]
    for batch in batches(data, trainer["max_steps"]):
        take_step(module, made, batch, max(workers, 1), trainer["gradient_clip_val"])
    loss = token_loss(module, data.val_dataloader())
    if not math.isfinite(loss):
        raise FloatingPointError(f"The validation loss is {loss}.")
    return loss


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def configuration(run: Run, steps: int, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run as plain values."""
    return composed([*run.overrides(steps), *overrides])


def loss_of(run: Run, steps: int, overrides: Sequence[str]) -> float:
    """Make one run and return its validation loss in nats per token."""
    return train(configuration(run, steps, overrides), run.workers)
