"""Distributed Lion's n workers played in one process, and a whole training run by them.

The vote's outcome is a function of the workers' gradients alone, so nothing has to travel to learn
what it does to a loss. W: workers, N: values in a parameter group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.common.pretraining import Config, batches
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.optimizer import decay_groups, lion_betas, warmup_cosine
from recipes.training.pretraining import build_data, build_module


class PlayedLion(Optimizer):
    """The formulas of `DistributedLion` for n workers, on one set of fp32 parameters.

    For each worker in turn: its gradients into the parameters' `grad`, then `cast`. After that one
    `step`. Bit for bit what n processes come to.

    Args:
        params: as for any optimizer; "lr", "betas" and "weight_decay" of a group are read at every
            step.
        lr: learning rate.
        betas: of direction and momentum.
        workers: how many there are.
        vote: "majority" or "average".

    Attributes:
        momenta_WN: per group, fp32: each worker's momentum of all its parameters, in their order.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], workers: int, vote: str
    ) -> None:
        assert vote in ("majority", "average"), vote
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        sizes = [sum(p.numel() for p in group["params"]) for group in self.param_groups]
        self.momenta_WN = [torch.zeros(workers, size) for size in sizes]
        self._votes_N = [torch.zeros(size) for size in sizes]  # sums of whole numbers: exact
        self._workers, self._vote = workers, vote

    @torch.no_grad()
    def cast(self, worker: int) -> None:
        """Add a worker's votes to the others' and move its momentum on.

        Raises:
            FloatingPointError: its gradient holds NaN or Inf.
        """
        kept = zip(self.param_groups, self.momenta_WN, self._votes_N, strict=True)
        for group, momenta_WN, votes_N in kept:
            b1, b2 = group["betas"]
            gradient_N = _flat([p.grad for p in group["params"]])
            if not gradient_N.isfinite().all():
                raise FloatingPointError(f"The gradient of worker {worker} holds NaN or Inf.")
            momentum_N = momenta_WN[worker]
            votes_N += torch.sign(momentum_N * b1 + gradient_N * (1 - b1))
            momentum_N.mul_(b2).add_(gradient_N * (1 - b2))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the parameters by the votes that were cast since the last step."""
        assert closure is None, "the gradients are those that were cast"
        for group, votes_N in zip(self.param_groups, self._votes_N, strict=True):
            delta_N = torch.sign(votes_N) if self._vote == "majority" else votes_N / self._workers
            sizes = [p.numel() for p in group["params"]]
            for p, delta in zip(group["params"], delta_N.split(sizes), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(delta.view(p.shape) * group["lr"])
            votes_N.zero_()


def played_lion_cosine(
    module: nn.Module, knobs: Config, workers: int, vote: str
) -> OptimizerLRSchedulerConfig:
    """Return `PlayedLion` with the schedule of `recipes.training.optimizer.lion_cosine`.

    Args:
        module: see `decay_groups`.
        knobs: `conf/optimizer/distributed_lion.yaml`.
        workers: see `PlayedLion`.
        vote: see `PlayedLion`.
    """
    groups = decay_groups(module, knobs["weight_decay"])
    b1, b2 = knobs["betas"] or lion_betas(knobs["total_steps"])
    optimizer = PlayedLion(groups, knobs["lr"], (b1, b2), workers, vote)
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
        module: what is trained.
        made: its optimizer and schedule. `PlayedLion`, or with one worker any optimizer, which then
            gets the gradient of the whole batch: the mean of what n workers' parts would give.
        batch: int64, shape (blocks of all workers, block_size + 1). Worker w has blocks w, w + n,
            and so on, as `DistributedSampler` deals them out.
        workers: into how many equal parts the batch is cut.
        clip: the largest norm of a worker's gradient; None: whatever it is.
    """
    optimizer, schedule = made["optimizer"], cast(LRSchedulerConfigType, made["lr_scheduler"])
    assert len(batch) % workers == 0, "parts of one size: all votes weigh the same"
    for worker in range(workers):
        optimizer.zero_grad()
        module.loss(batch[worker::workers]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        if isinstance(optimizer, PlayedLion):
            optimizer.cast(worker)
    optimizer.step()
    schedule["scheduler"].step()


def train(config: Config, workers: int, vote: str | None) -> float:
    """Train a model from its seed and return its validation loss in nats per token.

    Args:
        config: as `recipes.pretrain.pretrain` takes it, for one rank with the global batch. Its
            Trainer, strategy, loggers and report are not used, but for `trainer.max_steps` and
            `trainer.gradient_clip_val`.
        workers: how many vote; 1 without a vote.
        vote: "majority" or "average"; None: the configuration's optimizer on the mean gradient.

    Raises:
        FloatingPointError: the run has diverged.
    """
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    if vote is None:
        made: Any = module.configure_optimizers()
    else:
        made = played_lion_cosine(module, config["optimizer"], workers, vote)
    trainer = config["trainer"]
    for batch in batches(data, trainer["max_steps"]):
        take_step(module, made, batch, workers, trainer["gradient_clip_val"])
    loss = token_loss(module, data.val_dataloader())
    if not math.isfinite(loss):
        raise FloatingPointError(f"The validation loss is {loss}.")
    return loss


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
