"""LightningDataModules for pretraining: from a corpus to the batches of a rank."""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from recipes.configuration.ranges import Seed
from recipes.data.corpus import SPLITS, Corpus, Split
from recipes.data.token_blocks import Blocks, TokenBlocks, count_tokens, num_tokens, tokenize
from recipes.data.training_data import TrainingData


class BlockDataModule(TrainingData):
    """Blocks of tokens, which a subclass provides.

    A batch is an int64 tensor of shape (batch_size, block_size + 1): inputs are all columns but the
    last, targets all but the first.

    Args:
        tokenizer: the model's tokenizer.
        block_size: predictions per block; the model's context.
        batch_size: blocks per rank and micro-batch.
        num_workers: processes that prefetch; 0 reads in the training process.
        seed: of the order of the training blocks, which changes every epoch.

    Raises:
        ValueError: (from `setup`) there are fewer blocks than the ranks need.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        block_size: PositiveInt = 128,
        batch_size: PositiveInt = 8,
        num_workers: NonNegativeInt = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(tokenizer, block_size, batch_size, num_workers, seed)

    def blocks(self, split: Split) -> Blocks:
        """Return the blocks of a split."""
        raise NotImplementedError

    @override
    def rows(self, split: Split) -> Blocks:
        return self.blocks(split)

    @override
    def prepare_data(self) -> None:
        for split in SPLITS:
            self.blocks(split)

    @override
    def describe(self) -> str:
        train, validation = (num_tokens(self.blocks(split)) for split in SPLITS)
        return f"{train:,} training, {validation:,} validation tokens"

    @override
    def baseline_loss(self) -> float:
        return unigram_loss(self.blocks("train"), self.blocks("validation"), len(self.tokenizer))

    @override
    def prompt(self) -> str:
        return str(self.tokenizer.decode(self.blocks("validation").parts[0].tokens[:8].tolist()))

    def _require(self, split: Split, num_blocks: int) -> None:
        blocks = self.blocks(split)
        tokens = num_tokens(blocks)
        if tokens == 0:
            raise ValueError(
                f"The {split} split is empty: the files or dataset in `data` contain no text."
            )
        if len(blocks) < num_blocks:
            raise ValueError(
                f"The {split} split has {len(blocks)} blocks of {self.block_size} tokens (and"
                f" {tokens} tokens in all), and this run needs at least {num_blocks}. Use more"
                " text, or lower `data.block_size`, `data.batch_size` or `trainer.devices`."
            )


class TokenDataModule(BlockDataModule):
    """Blocks of a corpus, which is tokenized once.

    Args:
        corpus: source of the text.
        tokenizer: the model's tokenizer.
        cache_dir: folder for files of tokens.
        block_size: as for `BlockDataModule`.
        batch_size: as for `BlockDataModule`.
        num_workers: as for `BlockDataModule`.
        seed: as for `BlockDataModule`.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        cache_dir: str,
        block_size: PositiveInt = 128,
        batch_size: PositiveInt = 8,
        num_workers: NonNegativeInt = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(tokenizer, block_size, batch_size, num_workers, seed)
        self.corpus = corpus
        self._cache_dir = cache_dir

    @override
    def blocks(self, split: Split) -> TokenBlocks:
        """Return the blocks of a split, tokenizing the corpus if no run has done so before."""
        path = tokenize(self.corpus, split, self.tokenizer, self._cache_dir)
        return TokenBlocks(path, self.block_size)


def unigram_loss(train: Blocks, validation: Blocks, vocab_size: int) -> float:
    """Return the loss of a unigram model in nats per token.

    It is fitted to all training tokens, with add-one smoothing (an unseen token would cost
    infinity), and evaluated on the targets of all validation blocks, as the trained model is.
    """
    counts_V = count_tokens((part.tokens for part in train.parts), vocab_size) + 1
    log_p_V = np.log(counts_V / counts_V.sum())
    targets = (part.tokens[1 : len(part) * part.block_size + 1] for part in validation.parts)
    targets_V = count_tokens(targets, vocab_size)
    return float(-(targets_V @ log_p_V) / targets_V.sum())
