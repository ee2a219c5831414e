"""A rank's own buffers, frozen weights and schedulers are in its file and are restored."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.resume.own_tensors import OwnTensors
from lightning_commfree.resume.rank_files import Owner, RankFiles
from tests.fit.models import Noisy, Recorder, assert_same, loader, quiet_trainer
from tests.fit.saved import file_of, part_of, resume_warnings, sets_of
from tests.world import run_ranks

STEPS, EPOCH_STEPS = 8, 4


class Moved(Noisy):
    """Moves tensors on which the loss depends, on every rank in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.base.requires_grad_(False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.teacher(x) * self.table + self.cache[:3]
        return super().forward(x + 0.1 * self.count)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.move()
        return super().training_step(batch, index)

    def move(self) -> None:
        self.count += self.global_rank
        self.cache = torch.cat([self.cache, torch.ones(1)]) * 1.1  # it grows
        self.cache[0] += self.global_rank
        for parameter in self.teacher.parameters():
            parameter.data.mul_(0.9).add_(0.1 * self.global_rank)


class Scheduled(Moved):
    """Every rank's scheduler has settings of its own, which are in its state."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9 - 0.2 * self.global_rank)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}


class Voter(Moved):
    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return DistributedLion(trained, lr=0.02)


def fit(folder: Path, module: pl.LightningModule, size: int = 1, **kwargs: Any) -> Any:
    if isinstance(module, Voter):
        strategy: Any = DistributedLionStrategy()
    else:
        strategy = StreamingDiLoCoStrategy(sync_every=3, num_fragments=3, evaluate="outer")
    recorder = Recorder()
    ckpt = {key: kwargs.pop(key) for key in kwargs.keys() & {"ckpt_path", "weights_only"}}
    callbacks = [recorder, *kwargs.pop("callbacks", [])]
    trainer = quiet_trainer(
        strategy=strategy, devices=size, callbacks=callbacks, max_steps=STEPS, **kwargs
    )
    rows = 2 * EPOCH_STEPS * size
    with resume_warnings() as said:
        trainer.fit(module, loader(rows), loader(2 * size), **ckpt)
    return trainer, recorder.local, said


def straight_and_resumed(rank: int, size: int, folder: Path, kind: type[Moved]) -> Any:
    every = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
    )
    keep: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [every]}
    twice = {"val_check_interval": 2}
    trainer, straight, _ = fit(folder, kind(), size, **keep, **twice)
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    found = {}
    for step in (2, 3, 6):
        path = folder / f"step={step}.ckpt"
        again, local, said = fit(folder, kind(), size, ckpt_path=path, **twice)
        same_lr = again.optimizers[0].param_groups[0]["lr"] == lr
        found[step] = local, straight[step:], same_lr and not said
    return found, lr, sorted(part_of(folder / "step=3.ckpt", rank)["tensors"])


@pytest.mark.parametrize("kind", [Scheduled, Voter])
def test_tensors_and_schedulers_of_a_rank_come_back(tmp_path: Path, kind: type[Moved]) -> None:
    ranks = run_ranks(straight_and_resumed, 2, tmp_path, tmp_path, kind)
    for found, _, _ in ranks:
        for step, (local, straight, rest) in found.items():
            assert rest, f"resumed after step {step}"
            assert len(local) == len(straight)
            assert_same(local, straight)
    (_, lr, of_rank_0), (_, other_lr, of_rank_1) = ranks
    assert (lr != other_lr) == (kind is Scheduled)
    assert of_rank_0 == ["cache"], "the rest is in the checkpoint, or as it was"
    assert of_rank_1 == ["cache", "count", "teacher.bias", "teacher.weight"], "`base` is equal"


def test_tensors_without_values_or_elements_are_no_obstacle() -> None:
    module = nn.Module()
    module.register_buffer("none", torch.empty(0, dtype=torch.int64))
    module.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
    module.register_buffer("turned", torch.ones(4, 3, dtype=torch.bool).T, persistent=False)
    module.register_buffer("far", torch.ones(2, device="meta"), persistent=False)
    module.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
    own, alone = OwnTensors(module, list), Channel([0], 0, Ledger())
    channels = ReplicaChannels(alone, alone, alone)
    assert own.state(channels) == {}, "the checkpoint has them, or a new fit makes them"
    module.turned[0, 0] = False
    assert sorted(own.state(channels)) == ["turned"]


class Note:
    """Only pickle can load it."""


class Noted(Noisy):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["note"] = Note()
        return optimizer


def pickled(rank: int, size: int, folder: Path) -> Any:
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
    _, straight, _ = fit(folder, Noted(), size, enable_checkpointing=True, callbacks=[save])
    path = folder / "step=3.ckpt"
    _, resumed, said = fit(folder, Noted(), size, ckpt_path=path, weights_only=False)
    return straight[3:], resumed, said


def test_weights_only_false_reaches_the_files_of_the_ranks(tmp_path: Path) -> None:
    for straight, resumed, said in run_ranks(pickled, 2, tmp_path, tmp_path):
        assert not said
        assert_same(resumed, straight)


def test_a_file_with_objects_is_told_from_a_cut_one(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "last.ckpt")
    owner, folder = Owner(1, 2, "1-a"), files.folder("1-a")
    files.write(owner, {"note": Note(), "numbers": torch.arange(1000)})
    with pytest.raises(RuntimeError, match=r"pass `weights_only=False` to `Trainer\.fit`"):
        files.read(owner, folder)
    assert isinstance(files.read(owner, folder, weights_only=False)["note"], Note)
    file = file_of(tmp_path / "last.ckpt", 1)
    whole = file.read_bytes()
    for cut in (0, 1, 2, 3, 5, 30, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(RuntimeError, match="probably truncated"):
            files.read(owner, folder)


class Held(TorchCheckpointIO):
    """Writes when it may."""

    def __init__(self) -> None:
        self.may, self.written = threading.Event(), threading.Semaphore(0)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.may.wait(30)
        super().save_checkpoint(*args, **kwargs)
        self.written.release()


class Overwriting(pl.Callback):
    """Saves to one path after steps 1, 2 and 3; the second save is written in step 3."""

    def __init__(self, path: Path, writer: Held) -> None:
        self.path, self.writer = path, writer
        self.own: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step > 3:
            return
        if not trainer.is_global_zero:  # which writes its own file, and at once
            trainer.save_checkpoint(self.path)
            return
        if step == 3:
            self.writer.may.set()
            assert self.writer.written.acquire(timeout=30)
            self.writer.may.clear()
        trainer.save_checkpoint(self.path)
        if step == 1:
            self.writer.may.set()
            assert self.writer.written.acquire(timeout=30)
            self.writer.may.clear()
        shared = torch.load(self.path, weights_only=True)["lightning_commfree"]["shared"]
        self.own.append(part_of(self.path, 1) and shared["step"])
        if step == 3:
            self.writer.may.set()


def overwriting(rank: int, size: int, folder: Path) -> Any:
    writer = Held()
    callback = Overwriting(folder / "last.ckpt", writer)
    fit(folder, Noisy(), size, callbacks=[callback], plugins=[AsyncCheckpointIO(writer)])
    return callback.own, len(list(sets_of(folder / "last.ckpt").iterdir()))


def test_the_set_of_a_checkpoint_stays_until_the_next_one_is_written(tmp_path: Path) -> None:
    (own, sets), _ = run_ranks(overwriting, 2, tmp_path, tmp_path)
    assert own == [1, 1, 2], "on disk is the checkpoint of the step before"
    assert sets == 2


class Unsnapped(AsyncCheckpointIO):
    """Writes what the tensors are when it comes to it, as Lightning before 2.6 did."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._ensure_setup()
        self.late = self._executor.submit(self.checkpoint_io.save_checkpoint, *args, **kwargs)


class SavingLate(pl.Callback):
    """Saves after step 4 with a writer that has to wait for step 5."""

    def __init__(self, path: Path, writer: Held) -> None:
        self.path, self.writer = path, writer
        self.outer: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)
            with trainer.strategy.outer_weights():
                self.outer = {name: t.clone() for name, t in module.state_dict().items()}
            self.local = {name: t.clone() for name, t in module.named_parameters()}
        elif trainer.global_step == 5:
            self.writer.may.set()


def late(rank: int, size: int, folder: Path) -> tuple[bool, bool]:
    writer = Held()
    callback = SavingLate(folder / "late.ckpt", writer)
    _, straight, _ = fit(folder, Noisy(), callbacks=[callback], plugins=[Unsnapped(writer)])
    assert writer.written.acquire(timeout=30)
    saved = torch.load(folder / "late.ckpt", weights_only=True)["state_dict"]
    differ = any(not torch.equal(callback.local[name], saved[name]) for name in callback.local)
    _, resumed, _ = fit(folder, Noisy(), ckpt_path=folder / "late.ckpt")
    exact = all(
        torch.equal(got[name], expected[name])
        for got, expected in zip(resumed, straight[4:], strict=True)
        for name in expected
    )
    return all(torch.equal(saved[k], v) for k, v in callback.outer.items()) and differ, exact


def test_an_asynchronous_write_holds_the_weights_of_the_save(tmp_path: Path) -> None:
    assert run_ranks(late, 1, tmp_path, tmp_path) == [(True, True)]


def saved_afterwards(rank: int, size: int, folder: Path) -> list[str]:
    trainer, _, _ = fit(folder, Noisy())
    trainer.save_checkpoint(folder / "late.ckpt")
    return fit(folder, Noisy(), ckpt_path=folder / "late.ckpt")[2]


def test_a_checkpoint_saved_outside_a_fit_is_named_as_the_reason(tmp_path: Path) -> None:
    ((said,),) = run_ranks(saved_afterwards, 1, tmp_path, tmp_path)
    assert (
        "it has no per-rank state (saved by another strategy, as weights only, or outside `fit`)"
        in said
    )
