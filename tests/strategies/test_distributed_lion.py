"""The real strategy, in a real Trainer on real gloo ranks, against the serial twin, after every
step and bit for bit."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree import DistributedLion, DistributedLionStrategy
from lightning_commfree.lion import buckets
from tests.lion.serial import SerialLion
from tests.strategies.models import Recorder, Tiny, assert_same, dataset, quiet_trainer, rank_loader
from tests.world import run_ranks

STEPS = 24
ACCUMULATE = 2
BATCH = 2
LR, DECAY = 0.02, 0.3
CASES = list(product(("majority", "average"), (True, False)))  # vote, overlap


class Voter(Tiny):
    """Two groups: matrices decay, the others have another learning rate and other betas."""

    def configure_optimizers(self) -> Any:
        optimizer = DistributedLion(groups(self))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def groups(module: Tiny) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "lr": LR, "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "lr": LR / 4, "betas": (0.8, 0.95)},
    ]


def small_buckets(patch: pytest.MonkeyPatch) -> None:
    """Several buckets for a model of 200 parameters, so that some leave before others are ready."""
    patch.setattr(buckets, "_LEAST", 40)


def fit(
    rank: int, size: int, vote: str, overlap: bool, module: Tiny | None = None, **kwargs: Any
) -> Any:
    recorder = Recorder()
    strategy = DistributedLionStrategy(vote=vote, overlap=overlap, **kwargs)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        callbacks=[recorder],
        accumulate_grad_batches=ACCUMULATE,
    )
    rows = STEPS * ACCUMULATE * BATCH * size
    trainer.fit(module or Voter(), rank_loader(rows, BATCH, rank, size))
    return recorder.local[ACCUMULATE - 1 :: ACCUMULATE], dict(strategy.ledger.bytes_by_tag)


def play(size: int, vote: str) -> list[dict[str, Tensor]]:
    """The same training in this process; returns the parameters after every step."""
    module = Voter()
    named = dict(module.named_parameters())
    twin_groups = [
        {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0, **group} for group in groups(module)
    ]
    twin = SerialLion(twin_groups, size, vote)
    x, y = dataset(STEPS * ACCUMULATE * BATCH * size).tensors
    seen = []
    for step in range(STEPS):
        if step == 8 or step == 16:
            for group in twin_groups:
                group["lr"] *= 0.5
        gradients = []
        for worker in range(size):
            module.zero_grad()
            for micro in range(step * ACCUMULATE, (step + 1) * ACCUMULATE):
                rows = slice(micro * BATCH * size + worker, (micro + 1) * BATCH * size, size)
                (module.loss((x[rows], y[rows])) / ACCUMULATE).backward()
            gradients.append({p: p.grad.clone() for p in named.values()})
        twin.step(gradients)
        seen.append(copy.deepcopy({name: p.detach() for name, p in named.items()}))
    return seen


def all_fits(rank: int, size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        small_buckets(patch)
        return [fit(rank, size, *case) for case in CASES]


@pytest.mark.parametrize("size", [3, 4])
def test_every_step_equals_the_twin_bit_for_bit(tmp_path: Path, size: int) -> None:
    ranks = run_ranks(all_fits, size, tmp_path)
    twins = {vote: play(size, vote) for vote in ("majority", "average")}
    for case, (vote, _) in enumerate(CASES):
        for fits in ranks:
            seen, _ = fits[case]
            assert len(seen) == STEPS
            assert_same(seen, twins[vote])
    apart = twins["majority"][-1]["head.weight"] - twins["average"][-1]["head.weight"]
    assert apart.abs().max() > LR, "the two votes must part, or the comparison is weak"
