"""What a recipe asks of its data, whatever the rows are."""

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
    """Rows of tokens, each for one rank: in training once an epoch, in validation exactly once.

    The samplers are made here and not by Lightning, which leaves a `DistributedSampler` alone: for
    training to have one that can be resumed, for validation one that repeats no row to make the
    ranks' shares equal.

    Args:
        tokenizer: the model's tokenizer.
        block_size: tokens of a row that a model predicts from, at most; the model's context.
        batch_size: rows per rank and micro-batch.
        num_workers: processes that read ahead; 0 reads in the training process.
        seed: of the order of the training rows, which is another one in every epoch.

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
        """Return the training rows of one epoch, of all ranks together."""
        return len(self.rows("train"))  # type: ignore[arg-type]

    def tokens_per_row(self) -> int:
        """Return how many tokens a training row has, on average."""
        return self.block_size

    def describe(self) -> str:
        """Return one line on what there is to train on and to validate on."""
        raise NotImplementedError

    def baseline_loss(self) -> float | None:
        """Return what a unigram model of the training text loses, in nats per token; or None.

        On the very tokens on which a model is validated; None where only some of them are targets.
        """
        return None

    def prompt(self) -> str:
        """Return the words that a sample of the model's text shall begin with."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        size, _ = self.size_and_rank()
        self._require("train", self.batch_size * size)
        self._require("validation", size)

    @override
    def train_dataloader(self) -> ResumableDataLoader:
        size, rank = self.size_and_rank()
        sampler = ResumableSampler(
            self.rows("train"),
            num_replicas=size,
            rank=rank,
            shuffle=True,
            seed=self._seed,
            drop_last=True,
        )
        # a short last batch would give its rows a greater weight than the others have
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
        """Raise a `ValueError` if the split has fewer rows than `num_rows`."""
        raise NotImplementedError

    def size_and_rank(self) -> tuple[int, int]:
        """Return into how many shares the rows are divided, and this rank's share.

        The strategy's answer and not the world's: ranks that share one model read the same rows.
        """
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)
