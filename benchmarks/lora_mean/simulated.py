"""LoRA fine-tuning with M replicas in one process, with and without the exact mean of BA.

Replica m has the update B_m A_m of a layer. DiLoCo averages A and B, whose product differs from the
mean update by the residual R = mean(B_m A_m) - mean(B) mean(A) (FedEx-LoRA, arXiv:2410.09432).
Folding R into the frozen weight makes the mean exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.common.pretraining import batches
from benchmarks.size_ladder.played import PlayedReplicas
from lightning_commfree.diloco import DiLoCoSettings
from recipes.data.dialogues import Dialogues
from recipes.data.example_data import ExampleDataModule
from recipes.data.tokenizer import pretrained_tokenizer
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.optimizer import adamw_cosine
from recipes.training.pretrained import pretrained_config

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
STEPS, ROWS = 350, 32  # the fit ends with no fragment in flight, half a cycle after a landing
LR = 1e-2
# lr, momentum, mix: the plain mean of A and B, for which "exact" is defined, and the defaults
OUTERS = {"mean": (1.0, 0.0, 0.0), "defaults": (0.4, 0.9, 0.5)}


@dataclass(frozen=True)
class Run:
    """One fine-tuning run; `exact` folds the residual of every landing into the frozen weights."""

    replicas: int
    sync_every: int
    overlap_steps: int
    outer: str
    exact: bool
    seed: int


class Found(NamedTuple):
    """The figures of a run.

    Attributes:
        share: norm of R over the norm of the mean update since the last landing; mean over rounds.
        loss: after the fit, which ends with the mean of A and of B; nats per token.
        exact_loss: the same with the residual of this last mean folded in.
    """

    share: float
    loss: float
    exact_loss: float


class Layer(NamedTuple):
    """The mean update of a layer and its residual, both fp64 in the layout of BA."""

    mean: Tensor
    residual: Tensor


def adapters(module: nn.Module) -> list[Any]:
    """Return peft's LoRA layers in order."""
    return [layer for layer in module.modules() if hasattr(layer, "get_delta_weight")]


@torch.no_grad()
def mean_updates(modules: Sequence[nn.Module]) -> list[Layer]:
    """Return the mean of the replicas' updates by layer, and what averaging A and B misses."""
    found = []
    for layers in zip(*map(adapters, modules), strict=True):
        a = torch.stack([layer.lora_A["default"].weight.double() for layer in layers])
        b = torch.stack([layer.lora_B["default"].weight.double() for layer in layers])
        scale = layers[0].scaling["default"]
        mean = scale * (b @ a).mean(0)
        found.append(Layer(mean, mean - scale * (b.mean(0) @ a.mean(0))))
    return found


@torch.no_grad()
def fold(module: nn.Module, updates: Sequence[Layer]) -> None:
    """Add the residuals to the frozen weights of a module."""
    for layer, update in zip(adapters(module), updates, strict=True):
        weight, residual = layer.get_base_layer().weight, update.residual
        weight.add_(residual.T if layer.fan_in_fan_out else residual)


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the 2-norm of all values."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def train(run: Run, base: str, cache_dir: str) -> Found:
    """Fine-tune a pretrained model with LoRA on M replicas.

    Args:
        run: settings.
        base: folder of the pretrained model.
        cache_dir: for the tokens of the dialogues.
    """
    pl.seed_everything(run.seed, verbose=False)
    data = ExampleDataModule(
        Dialogues(), pretrained_tokenizer(base), cache_dir, 64, ROWS, seed=run.seed
    )
    data.prepare_data()
    data.setup("fit")
    factory = partial(adamw_cosine, total_steps=STEPS, lr=LR)
    config = pretrained_config(base).to_dict()
    module = LanguageModel(config, factory, pretrained=base, lora=LORA)
    modules = [module, *(deepcopy(module) for _ in range(run.replicas - 1))]
    made: list[Any] = [one.configure_optimizers() for one in modules]
    lr, momentum, mix = OUTERS[run.outer]
    outer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    settings = DiLoCoSettings(
        run.sync_every, 1, "strided", run.overlap_steps, mix, "fp32", outer, replica_size=1
    )
    diloco = PlayedReplicas(modules, settings)
    schedule = diloco.replicas[0].schedule

    shares, sent = [], mean_updates(modules)
    landed = [layer.mean for layer in sent]
    for step, batch in enumerate(batches(data, STEPS), 1):
        for m, (one, of_one) in enumerate(zip(modules, made, strict=True)):
            of_one["optimizer"].zero_grad()
            one.loss({name: rows[m :: run.replicas] for name, rows in batch.items()}).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            of_one["optimizer"].step()
            of_one["lr_scheduler"]["scheduler"].step()
        if schedule.launched_at(step):
            sent = mean_updates(modules)
            moved = norm([now.mean - then for now, then in zip(sent, landed, strict=True)])
            shares.append(norm([layer.residual for layer in sent]) / moved)
        diloco.after_steps()
        if schedule.landed_at(step):
            for one in modules if run.exact else ():
                fold(one, sent)
            landed = [layer.mean for layer in mean_updates(modules)]

    last = mean_updates(modules)
    diloco.finish()
    diloco.close()
    loss = token_loss(module, data.val_dataloader())
    fold(module, last)
    exact_loss = token_loss(module, data.val_dataloader())
    return Found(sum(shares) / len(shares), loss, exact_loss)
