"""Manual optimization: a training step may step several optimizers, or none."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_commfree import StreamingDiLoCoStrategy
from tests.diloco.serial import SerialDiLoCo
from tests.strategies.models import Recorder, dataset, quiet_trainer, rank_loader
from tests.world import run_ranks

BATCH = 2
# in the last of 20 batches no optimizer steps, so the end of the fit is not foreseen in a step
BATCHES = 18, 20
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SETTINGS: dict[str, Any] = {
    "sync_every": 4,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp32",
    "fragment_pattern": "balanced",
    "outer_optimizer": OUTER,
}


class Gan(pl.LightningModule):
    """A generator that is stepped in every third batch, and a critic in all but every fifth.

    So some batches step both, some one, and batch 4 of 15 none. Clipping, a scheduler and gradients
    that accumulate over batches are the module's own; the other network is frozen by
    `toggle_optimizer`.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        self.critic = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
        self.automatic_optimization = False

    def critic_loss(self, batch: Any) -> Tensor:
        x, y = batch
        fake = self.generator(x).detach()
        return self.critic(fake).mean() - self.critic(y).mean() + self.critic(y).square().mean()

    def generator_loss(self, batch: Any) -> Tensor:
        x, y = batch
        fake = self.generator(x)
        return (fake - y).square().mean() - self.critic(fake).mean()

    def training_step(self, batch: Any, i: int) -> None:
        generator, critic = self.optimizers()
        if i % 5 != 4:
            self.toggle_optimizer(critic)
            critic.zero_grad()
            self.manual_backward(self.critic_loss(batch))
            self.clip_gradients(critic, gradient_clip_val=0.5)
            critic.step()
            self.untoggle_optimizer(critic)

        self.toggle_optimizer(generator)
        self.manual_backward(self.generator_loss(batch) / 3)  # accumulates over three batches
        if i % 3 == 2:
            generator.step()
            generator.zero_grad()
            self.lr_schedulers().step()
        self.untoggle_optimizer(generator)

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.generator_loss(batch), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW(self.generator.parameters(), lr=1e-2)
        critic = torch.optim.SGD(self.critic.parameters(), lr=1e-1, momentum=0.9)
        return [generator, critic], [torch.optim.lr_scheduler.StepLR(generator, 2, 0.5)]


def fit(rank: int, size: int) -> Any:
    return {batches: fit_one(rank, size, batches) for batches in BATCHES}


def fit_one(rank: int, size: int, batches: int, **changes: Any) -> Any:
    strategy = StreamingDiLoCoStrategy(**{**SETTINGS, **changes})
    recorder = Recorder()
    trainer = quiet_trainer(strategy=strategy, devices=size, max_epochs=1, callbacks=[recorder])
    module = Gan()
    trainer.fit(module, rank_loader(batches * BATCH * size, BATCH, rank, size))
    final = {name: p.detach().clone() for name, p in module.named_parameters()}
    return recorder.local, recorder.outer, final, strategy.fragments, trainer.global_step


def play(
    size: int, fragments: list[list[str]], batches: int, count_all: bool = False
) -> tuple[list[list[dict[str, Tensor]]], list[list[Tensor]], dict[str, Tensor]]:
    """The same training in this process, without Lightning.

    Returns what the replicas hold, and the global copies, after every batch; and the end.

    Args:
        size: replicas.
        fragments: names of their parameters.
        batches: of the fit.
        count_all: a batch in which no optimizer steps counts too; a mistake.
    """
    modules = [Gan() for _ in range(size)]
    made = [module.configure_optimizers() for module in modules]
    x, y = dataset(batches * BATCH * size).tensors
    at = -1  # the batch

    def train(m: int, i: int) -> None:
        module, ((generator, critic), (scheduler,)) = modules[m], made[m]
        rows = slice(i * BATCH * size + m, (i + 1) * BATCH * size, size)
        batch = x[rows], y[rows]
        if i % 5 != 4:
            critic.zero_grad()
            module.critic_loss(batch).backward(inputs=[*module.critic.parameters()])
            nn.utils.clip_grad_norm_(module.critic.parameters(), 0.5)
            critic.step()
        (module.generator_loss(batch) / 3).backward(inputs=[*module.generator.parameters()])
        if i % 3 == 2:
            generator.step()
            generator.zero_grad()
            scheduler.step()

    twin = SerialDiLoCo(modules, lambda m, _: train(m, at), fragments, 4, 2, 0.5, OUTER)
    local: list[list[dict[str, Tensor]]] = [[] for _ in modules]
    outer = []
    for at in range(batches):
        steps = at % 5 != 4 or at % 3 == 2
        if steps or count_all:
            twin.run_step()
        else:
            for m in range(size):
                train(m, at)
        if at == batches - 1 and steps:
            twin.finish()
        for m, module in enumerate(modules):
            local[m].append(copy.deepcopy({n: p.detach() for n, p in module.named_parameters()}))
        outer.append([torch.cat([twin.outer[n].detach().flatten() for n in f]) for f in fragments])
    twin.finish()  # a second time moves nothing
    return local, outer, {n: p.detach() for n, p in modules[0].named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_optimizers_equal_the_serial_twin_after_every_batch(
    size: int, tmp_path: Path
) -> None:
    ranks = run_ranks(fit, size, tmp_path)
    for batches in BATCHES:
        fragments = ranks[0][batches][3]
        names = [name for fragment in fragments for name in fragment]
        assert sorted(names) == sorted(name for name, _ in Gan().named_parameters())
        local, outer, end = play(size, fragments, batches)
        for rank in range(size):
            got_local, got_outer, final, _, steps = ranks[rank][batches]
            of_each = sum(i % 5 != 4 for i in range(batches)), batches // 3
            assert steps == sum(of_each), "the Trainer counts the steps of both optimizers"
            assert len(got_local) == batches
            for i in range(batches):
                where = f"rank {rank}, batch {i}"
                for name, expected in local[rank][i].items():
                    assert torch.equal(got_local[i][name], expected), f"{where} {name}"
                for expected, copy_ in zip(outer[i], got_outer[i], strict=True):
                    assert torch.equal(copy_, expected), f"{where} global copy"
            assert all(torch.equal(final[name], expected) for name, expected in end.items())


def test_a_batch_without_a_step_is_seen_by_the_twin() -> None:
    """To count batches in which nothing steps gives other weights: the test above can fail."""
    fragments = [[name for name, _ in Gan().named_parameters()]]
    right, wrong = (play(2, fragments, 18, count_all)[2] for count_all in (False, True))
    assert not all(torch.equal(right[name], wrong[name]) for name in right)
