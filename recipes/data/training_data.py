"""Base class of the data modules: distributes rows of tokens over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from pydantic import NonNegativeInt, PositiveInt
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from recipes.configuration.ranges import Seed
from recipes.data.corpus import Split
from recipes.data.resumable import ResumableDataLoader, ResumableSampler


class TrainingData(pl.LightningDataModule):
    """Rows of tokens, distributed over the ranks; validation reads each row exactly once.

    Creates the samplers instead of Lightning (which keeps an existing `DistributedSampler`): a
    resumable one for training, and for validation one that does not repeat rows to even out the
    ranks' shares.

    Args:
        tokenizer: the model's tokenizer.
        block_size: maximum number of tokens of a row; the model's context.
        batch_size: rows per rank and micro-batch.
        num_workers: processes that prefetch; 0 reads in the training process.
        seed: of the order of the training rows, which changes every epoch.

    Raises:
        ValueError: (from `setup`) there are fewer rows than the ranks need.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        block_size: PositiveInt,
        batch_size: PositiveInt,
        num_workers: NonNegativeInt = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.batch_size = batch_size
        self._num_workers = num_workers
        self._seed = seed
        self._collate: Callable[[list[Any]], Any] | None = None

    def rows(self, split: Split) -> Dataset[Any]:
        """Return the rows of a split."""
        raise NotImplementedError

    def num_rows(self) -> int:
        """Return the number of training rows of one epoch, for all ranks together."""
        return len(self.rows("train"))  # type: ignore[arg-type]

    def tokens_per_row(self) -> int:
        """Return the average number of tokens of a training row."""
        return self.block_size

    def describe(self) -> str:
        """Describe the training and validation data in one line."""
        raise NotImplementedError

    def baseline_loss(self) -> float | None:
        """Return the validation loss of a unigram model of the training text, in nats per token.

        None where only some tokens are targets.
        """
        return None

    def prompt(self) -> str:
        """Return the beginning of the text that the trained model is to continue."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        size, _ = self.size_and_rank()
        self._require("train", self.batch_size * size)
        self._require("validation", size)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        if getattr(self.trainer, "overfit_batches", 0):
            # in order, so that every epoch has the same batches; Lightning divides them by rank
            return DataLoader(
                self.rows("train"),
                self.batch_size,
                drop_last=True,
                num_workers=self._num_workers,
                collate_fn=self._collate,
            )
        size, rank = self.size_and_rank()
        sampler = ResumableSampler(
            self.rows("train"),
            num_replicas=size,
            rank=rank,
            shuffle=True,
            seed=self._seed,
            drop_last=True,
        )
        # a short last batch would give its rows a greater weight
        return ResumableDataLoader(
            sampler,
            self.batch_size,
            drop_last=True,
            num_workers=self._num_workers,
            collate_fn=self._collate,
        )

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        size, rank = self.size_and_rank()
        rows = self.rows("validation")
        sampler = UnrepeatedDistributedSampler(rows, num_replicas=size, rank=rank, shuffle=False)
        return DataLoader(
            rows,
            self.batch_size,
            sampler=sampler,
            num_workers=self._num_workers,
            collate_fn=self._collate,
        )

    def _require(self, split: Split, num_rows: int) -> None:
        """Raise a `ValueError` if a split has fewer than `num_rows` rows."""
        raise NotImplementedError

    def size_and_rank(self) -> tuple[int, int]:
        """Return the number of shares of the data, and the index of this rank's share.

        The strategy decides: ranks that share one model read the same rows.
        """
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)
