"""Small modules and recorders for Trainer tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from lightning_commfree import DistributedLion
from lightning_commfree.host import pl

WIDTH = 6


class Tiny(pl.LightningModule):
    """Four equal blocks between an input and an output layer; AdamW, whose state a sync must not
    touch."""

    def __init__(self, lr: float = 1e-2, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 1, bias=False)
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = self.loss(batch)
        if i == 0:  # Lightning takes a quarter of a step of this size to log
            self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.02)


class Noisy(Tiny):
    """Draws random numbers in every step, and other ones on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))

    def on_fit_start(self) -> None:
        torch.manual_seed(100 + self.global_rank)


def dataset(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 3, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def loader(rows: int, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(dataset(rows), batch_size=batch_size)


def rank_loader(rows: int, batch_size: int, rank: int, size: int) -> DataLoader[Any]:
    """Return a loader of rows rank, rank + size, ... in this order; left to itself, Lightning would
    shuffle."""
    data = dataset(rows)
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


class Seeded(Sampler[int]):
    """Shuffles with a generator of its own, as chemprop's `SeededSampler` does."""

    def __init__(self, rows: int, seed: int = 3) -> None:
        self.indices, self.random = np.arange(rows), np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.indices)
        return iter(self.indices.tolist())


class Drawn:
    """A loader that knows its place: batches are drawn, other ones for every seed.

    Args:
        draw: makes a batch.
        batches: of an epoch.
        seed: of the random numbers.
    """

    def __init__(self, draw: Callable[[torch.Generator], Any], batches: int, seed: int) -> None:
        self.draw, self.batches = draw, batches
        self.random = torch.Generator().manual_seed(seed)
        self.done = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.done %= self.batches
        while self.done < self.batches:
            self.done += 1
            yield self.draw(self.random)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.random.set_state(state["random"])


class Recorder(pl.Callback):
    """Keeps the parameters after every optimizer step, and the global copies where the strategy has
    any."""

    def __init__(self) -> None:
        self.local: list[dict[str, Tensor]] = []
        self.outer: list[list[Tensor]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.local.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        diloco = getattr(trainer.strategy, "_diloco", None)
        if diloco is not None:
            self.outer.append([fragment.global_copy.clone() for fragment in diloco.fragments])


class SavesAfterBatches(pl.Callback):
    """Saves after every batch, or after the given ones, counted from 1 over all epochs."""

    def __init__(self, folder: Path, *only: int) -> None:
        self.folder, self.only, self.batches = folder, only, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        if not self.only or self.batches in self.only:
            trainer.save_checkpoint(self.folder / f"{self.batches}.ckpt")


def assert_same(got: Any, expected: Any, where: str = "") -> None:
    """Compare nested states bit for bit; the error says where the first difference is."""
    if isinstance(expected, Tensor):
        assert torch.equal(got, expected), where
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(got[name], value, f"{where}[{name!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(got[i], value, f"{where}[{i}]")
    else:
        assert got == expected, where


def quiet_trainer(**kwargs: Any) -> pl.Trainer:
    """Return a CPU Trainer that writes and prints nothing unless it is asked to."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**quiet, **kwargs})


@contextmanager
def info_messages() -> Iterator[list[str]]:
    """Collect the messages that Lightning and the strategies log with `rank_zero_info`."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log  # of the Lightning package that was imported last
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.disabled = False  # a recipe's test in this process may have configured logging
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def assert_saves_its_weights(trainer: pl.Trainer, module: pl.LightningModule, folder: Path) -> None:
    """Save after a forked fit, in the process that launched the ranks, as `ddp_fork` does."""
    trainer.save_checkpoint(folder / "after.ckpt")
    state = torch.load(folder / "after.ckpt", weights_only=True)["state_dict"]
    assert state.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(state[name], tensor), name
