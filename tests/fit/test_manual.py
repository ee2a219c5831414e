"""Manual optimization: a training step may step several optimizers, or none."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.diloco.serial import SerialDiLoCo
from tests.fit.models import Recorder, dataset, loader, quiet_trainer, rank_loader
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


def test_several_optimizers_equal_the_serial_twin_after_every_batch(tmp_path: Path) -> None:
    size = 3
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


class Voter(pl.LightningModule):
    """One optimizer, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        raise AssertionError("refused before")

    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters())


class Voters(Gan):
    def configure_optimizers(self) -> Any:
        return [DistributedLion(net.parameters()) for net in (self.generator, self.critic)]


def refused(rank: int, size: int) -> list[str]:
    inside_fsdp = {"inside": "fsdp"}
    texts = []
    for strategy, module in (
        (DistributedLionStrategy(), Voter()),
        (DistributedLionStrategy(), Voters()),
        (DistributedLionStrategy(node_size=2, **inside_fsdp), Voter()),
        (StreamingDiLoCoStrategy(**SETTINGS, replica_size=2, **inside_fsdp), Gan()),
    ):
        try:
            quiet_trainer(strategy=strategy, devices=size, max_epochs=1).fit(module, loader(8))
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_votes_and_fsdp_inside_are_refused(tmp_path: Path) -> None:
    """What to do is in the message: Streaming DiLoCo takes such a module."""
    for *votes, inside in run_ranks(refused, 2, tmp_path):
        assert len(votes) == 3
        for text in votes:
            assert text.startswith(
                "`DistributedLionStrategy` does not support manual optimization: its ranks exchange"
                " something at every optimizer step"
            )
        assert "`StreamingDiLoCoStrategy` does not support manual optimization" in inside
        assert "manual optimization calls backward inside it" in inside
        for text in (*votes, inside):
            assert "Set `automatic_optimization = True` and use one optimizer" in text
            assert "or use `StreamingDiLoCoStrategy` with `inside='ddp'`" in text


class SaveEvery(pl.Callback):
    """Saves after every batch, those without an optimizer step too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.batches = folder, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        trainer.save_checkpoint(self.folder / f"{self.batches}.ckpt")


def resumed(rank: int, size: int, folder: Path) -> Any:
    """What a fit of two epochs holds after every batch, and the same of fits that resume it."""
    outcomes = {}
    for after in (0, 2, 5, 12, 18):
        torch.manual_seed(100 * rank + after)
        recorder = Recorder()
        trainer = quiet_trainer(
            strategy=StreamingDiLoCoStrategy(**SETTINGS),
            devices=size,
            max_epochs=2,
            val_check_interval=4,
            callbacks=[recorder] if after else [recorder, SaveEvery(folder)],
        )
        data = DataLoader(dataset(12 * BATCH * size), batch_size=BATCH, shuffle=True)
        path = folder / f"{after}.ckpt" if after else None
        trainer.fit(Gan(), data, loader(4 * size), ckpt_path=path)
        loss = float(trainer.callback_metrics["val_loss"])
        outcomes[after] = recorder.local, recorder.outer, loss, trainer.global_step
    return outcomes


def test_a_fit_resumes_bit_for_bit_after_any_batch(tmp_path: Path) -> None:
    """In the middle of an accumulation by hand, after a batch without a step, with fragments in
    flight: optimizers, scheduler and gradients come back."""
    for outcomes in run_ranks(resumed, 2, tmp_path, tmp_path):
        local, outer, *end = outcomes.pop(0)
        assert len(local) == 24
        for after, (got_local, got_outer, *got_end) in outcomes.items():
            assert len(got_local) == 24 - after
            for i, (got, expected) in enumerate(zip(got_local, local[after:], strict=True)):
                for key in expected:
                    assert torch.equal(got[key], expected[key]), (after, after + i, key)
            for got_copies, copies in zip(got_outer, outer[after:], strict=True):
                assert all(map(torch.equal, got_copies, copies)), after
            assert got_end == end


def replicas(rank: int, size: int, replica_size: int) -> Any:
    """Two replicas; batch i of replica m is the batches of its ranks, in their order."""
    recorder = Recorder()
    unused = {"find_unused_parameters": True} if replica_size > 1 else {}  # as `ddp` needs it
    strategy = StreamingDiLoCoStrategy(**SETTINGS, replica_size=replica_size, **unused)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    rows = torch.arange(18 * BATCH * 4).view(18, BATCH, 4)  # batch, sample, quarter
    quarters = 4 // size
    mine = rows[:, :, quarters * rank : quarters * (rank + 1)].transpose(1, 2).reshape(-1)
    x, y = dataset(18 * BATCH * 4).tensors
    data = TensorDataset(x[mine], y[mine])
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    trainer.fit(Gan(), DataLoader(data, batch_size=quarters * BATCH, sampler=sampler))
    return recorder.local


def test_replicas_of_two_ranks_are_replicas_with_their_batches(tmp_path: Path) -> None:
    """To rounding: DDP adds the ranks' mean gradients, one rank averages over all samples."""
    (tmp_path / "four").mkdir()
    (tmp_path / "two").mkdir()
    four = run_ranks(replicas, 4, tmp_path / "four", 2)
    two = run_ranks(replicas, 2, tmp_path / "two", 1)
    assert not torch.equal(two[0][0]["critic.0.weight"], two[1][0]["critic.0.weight"])
    for rank, local in enumerate(four):
        for got, twin, expected in zip(local, four[rank ^ 1], two[rank // 2], strict=True):
            for name in expected:
                assert torch.equal(got[name], twin[name]), "one replica, one copy"
                torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)
