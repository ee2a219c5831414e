"""Pretraining by DDP or by simulated DiLoCo, and fine-tuning, in one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
from hydra.utils import instantiate
from torch import nn
from transformers import PreTrainedTokenizerBase

from benchmarks.common.pretraining import TINY_GPT2, batches, composed, take_steps
from benchmarks.size_ladder.played import PlayedReplicas
from recipes.data.dialogues import Dialogues
from recipes.data.example_data import ExampleDataModule
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.optimizer import adamw_cosine
from recipes.training.pretraining import build_data, build_module

BLOCKS_PER_STEP = 64  # of all replicas together
REPLICAS, SYNC_EVERY = 4, 30
OUTER_LR, MOMENTUM, MIX = 1.0, 0.5, 0.0
DILOCO_STEPS = 800
DDP_LENGTHS = (200, 800)  # steps, of the search for DiLoCo's loss
EQUAL = 0.5  # percent; losses that differ by less are equal
CONTEXT = 64  # tokens; dialogues of 120 characters fit
RUNS = {
    "ddp": ["strategy=ddp", "trainer.devices=1", "optimizer.lr=0.0226"],
    "diloco": [
        "strategy=streaming_diloco",
        f"trainer.devices={REPLICAS}",
        "optimizer.lr=0.0113",
        f"strategy.sync_every={SYNC_EVERY}",
        f"strategy.mix={MIX}",
        "strategy.outer_optimizer={_target_: torch.optim.SGD, _partial_: true,"
        f" lr: {OUTER_LR}, momentum: {MOMENTUM}, nesterov: true}}",
    ],
}
TUNING_STEPS, TUNING_ROWS, TUNING_LR = 200, 32, 1e-3


def overrides(name: str, seed: int, steps: int) -> list[str]:
    """Return the overrides of `recipes.pretrain` for a run, with the batch of all replicas."""
    rows = [f"data.block_size={CONTEXT}", f"data.batch_size={BLOCKS_PER_STEP}"]
    return [*TINY_GPT2, *RUNS[name], *rows, f"trainer.max_steps={steps}", f"seed={seed}"]


class Pretrained(NamedTuple):
    """A pretrained model and its validation loss in nats per token."""

    module: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    loss: float
    steps: int


def pretrain_both(seed: int, cache_dir: str) -> dict[str, Pretrained]:
    """Pretrain DiLoCo, and DDP for as many steps as give the same loss, found by bisection."""
    diloco = pretrain("diloco", seed, DILOCO_STEPS, cache_dir)
    low, high = DDP_LENGTHS
    tried: list[Pretrained] = []
    while high - low > 20 and not (tried and _difference(tried[-1], diloco) <= EQUAL / 2):
        tried.append(pretrain("ddp", seed, (low + high) // 2, cache_dir))
        found = tried[-1]
        low, high = (found.steps, high) if found.loss > diloco.loss else (low, found.steps)
    return {"ddp": min(tried, key=lambda one: _difference(one, diloco)), "diloco": diloco}


def _difference(one: Pretrained, other: Pretrained) -> float:
    return abs(100 * (one.loss / other.loss - 1))


def pretrain(name: str, seed: int, steps: int, cache_dir: str) -> Pretrained:
    """Pretrain one of `RUNS`."""
    config = composed([*overrides(name, seed, steps), f"cache_dir={cache_dir}"])
    pl.seed_everything(seed, workers=True, verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    replicas = config["trainer"]["devices"]
    modules = [module, *(deepcopy(module) for _ in range(replicas - 1))]
    made = [one.configure_optimizers() for one in modules]
    diloco = None
    if replicas > 1:
        settings = instantiate(config["strategy"], _convert_="all").settings
        diloco = PlayedReplicas(modules, settings)
    for batch in batches(data, config["trainer"]["max_steps"]):
        take_steps(modules, made, batch, config["trainer"]["gradient_clip_val"])
        if diloco is not None:
            diloco.after_steps()
    if diloco is not None:
        diloco.finish()
        diloco.close()
    return Pretrained(module, data.tokenizer, token_loss(module, data.val_dataloader()), steps)


def finetune(
    module: LanguageModel, tokenizer: PreTrainedTokenizerBase, seed: int, cache_dir: str
) -> tuple[float, float]:
    """Fine-tune a model on the dialogues; return its loss on them before and after."""
    pl.seed_everything(seed, workers=True, verbose=False)
    data = ExampleDataModule(Dialogues(), tokenizer, cache_dir, CONTEXT, TUNING_ROWS, seed=seed)
    data.prepare_data()
    data.setup("fit")
    before = token_loss(module, data.val_dataloader())
    made = adamw_cosine(module, TUNING_STEPS, TUNING_LR, (0.9, 0.999), weight_decay=0.01)
    optimizer, schedule = made["optimizer"], cast(Any, made["lr_scheduler"])["scheduler"]
    for batch in batches(data, TUNING_STEPS):
        optimizer.zero_grad()
        module.loss(batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return before, token_loss(module, data.val_dataloader())
