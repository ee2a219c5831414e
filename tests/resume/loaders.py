"""Loaders, samplers, data sets and a callback of users, whose state Lightning ignores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset


class Stateful(DataLoader[Any]):
    """A loader with the state of torchdata's: where its iterator is, and whether that is finished.

    Its first iterator after a load goes on there, with a new order. Who reads just `len` batches
    never finishes an iterator.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begin_at, self.yielded, self.finished = 0, 0, False

    def __iter__(self) -> Any:
        if self.finished:
            self.begin_at, self.finished = 0, False
        self.yielded, self.begin_at = self.begin_at, 0
        return self._read(islice(super().__iter__(), self.yielded, None))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.yielded += 1
            yield batch
        self.finished = True

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded, "finished": self.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at, self.finished = state["yielded"], state["finished"]


class OwnStateful(Stateful):
    """The same, by an unknown author."""


Stateful.__module__ = "torchdata.stateful_dataloader"  # whose class the library knows


class Halved(DataLoader[Any]):
    """A loader whose iterator is a generator, which creates that of torch when it is first read."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x / 2, y


class Counting(BatchSampler):
    """Shuffles a share of the rows by a number, and counts its epochs."""

    def __init__(self, rows: int, batch: int, share: int = 0, shares: int = 1) -> None:
        super().__init__(range(rows // shares), batch, drop_last=False)
        self.rows, self.batch, self.share, self.shares, self.epoch = rows, batch, share, shares, 0

    def __iter__(self) -> Any:
        self.epoch += 1
        numbers = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.rows, generator=numbers)[self.share :: self.shares]
        return iter(order.view(-1, self.batch).tolist())


class Batches(Counting):
    """Shuffles by an epoch that somebody has to set."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch - 1


class Harder(Dataset[Any]):
    """Its order depends on an epoch that somebody has to set."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[(index + self.epoch) % len(self)]


class Noise(Dataset[Any]):
    """Adds noise to the inputs in the process that reads them."""

    def __init__(self, rows: Any, numbers: torch.Generator | None = None) -> None:
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + torch.randn(3, generator=self.numbers), y


class ByEpoch:
    """A loader without a state whose epoch somebody has to set, and with random numbers."""

    def __init__(self, rows: Any, batch: int) -> None:
        self.rows, self.batch, self.epoch = rows, batch, 0
        self.numbers = torch.Generator().manual_seed(4)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows) // self.batch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        for some in order.view(-1, self.batch):
            x, y = self.rows[some]
            yield x + torch.randn(3, generator=self.numbers), y


class SetsEpoch(pl.Callback):
    """Sets epochs, as users do where Lightning does not: twice the epoch, to be hard to guess."""

    def __init__(self, *owners: Any) -> None:
        self.owners = owners

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for owner in self.owners:
            owner.set_epoch(2 * trainer.current_epoch + 1)
