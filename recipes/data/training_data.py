"""What a recipe asks of its data, whatever the rows are."""

from __future__ import annotations

import lightning.pytorch as pl
from transformers import PreTrainedTokenizerBase


class TrainingData(pl.LightningDataModule):
    """Rows of tokens for the ranks of a run, in two splits.

    Args:
        tokenizer: the model's tokenizer.
        block_size: tokens of a row that a model predicts from, at most; the model's context.
        batch_size: rows per rank and micro-batch.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, block_size: int, batch_size: int
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.batch_size = batch_size

    def num_rows(self) -> int:
        """Return the training rows of one epoch, of all ranks together."""
        raise NotImplementedError

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

    def size_and_rank(self) -> tuple[int, int]:
        """Return into how many shares the rows are divided, and this rank's share.

        The strategy's answer and not the world's: ranks that share one model read the same rows.
        """
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)
