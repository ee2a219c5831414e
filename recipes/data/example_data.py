"""The LightningDataModule for fine-tuning: from examples to the batches of a rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from recipes.configuration.ranges import InnerFraction, Seed
from recipes.data.cache import cache_key
from recipes.data.corpus import SPLITS, Split
from recipes.data.example_rows import (
    Collator,
    ExampleFile,
    ExampleRows,
    Fitted,
    Indices,
    write_examples,
)
from recipes.data.examples import ExampleCorpus
from recipes.data.token_blocks import fingerprint
from recipes.data.training_data import TrainingData

_SPLIT_SEED = 0  # independent of the run's seed: all runs are validated on the same examples


class ExampleDataModule(TrainingData):
    """Rows of examples, distributed over the ranks; validation reads each row exactly once.

    `Collator` documents the batches.

    Args:
        corpus: source of the examples.
        tokenizer: the model's tokenizer; receives the chat template of the corpus, if there is one.
        cache_dir: folder for files of tokens.
        block_size: tokens of a row; longer examples are truncated, and dropped if no target
            remains.
        batch_size: rows per rank and micro-batch.
        packing: put as many whole examples into a row as fit; otherwise each has its own row,
            padded to the longest of its batch.
        validation_fraction: of the training examples to hold out where the corpus has no validation
            split.
        num_workers: processes that prefetch; 0 reads in the training process.
        seed: of the order of the training rows, which changes every epoch.

    Raises:
        ValueError: `validation_fraction` is not between 0 and 1, or the tokenizer lacks a required
            token. From `prepare_data`: an example is malformed, or none has a target. From
            `setup`: there are fewer rows than the ranks need.
    """

    def __init__(
        self,
        corpus: ExampleCorpus,
        tokenizer: PreTrainedTokenizerBase,
        cache_dir: str,
        block_size: PositiveInt = 512,
        batch_size: PositiveInt = 8,
        packing: bool = True,
        validation_fraction: InnerFraction = 0.05,
        num_workers: NonNegativeInt = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(tokenizer, block_size, batch_size, num_workers, seed)
        if not 0 < validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction={validation_fraction} must be between 0 and 1, such as"
                " 0.05."
            )
        corpus.prepare(tokenizer)
        self.corpus = corpus
        self.packing = packing
        self._cache_dir = cache_dir
        self._validation_fraction = validation_fraction
        self._collate = Collator(packing, _filler(tokenizer))
        self._rows: dict[Split, ExampleRows] = {}

    def rows(self, split: Split) -> ExampleRows:
        """Return the rows of a split; some process must have called `prepare_data`."""
        if split not in self._rows:
            file, fitted = self._fitted(split)
            rows = ExampleRows(file, fitted.kept, self.block_size, self.packing)
            self._rows[split] = rows
        return self._rows[split]

    @override
    def prepare_data(self) -> None:
        for split in SPLITS if self.corpus.has_validation else SPLITS[:1]:
            write_examples(self._path(split), self.corpus.examples(split, self.tokenizer))
        for split in SPLITS:
            _, fitted = self._fitted(split)
            if fitted.num_dropped and not len(fitted.kept):
                raise ValueError(
                    f"None of the {fitted.num_dropped} {split} examples has a target within"
                    f" {self.block_size} tokens: there is no response, or no turn of the role"
                    " 'assistant'. Check the data, or raise `data.block_size`."
                )

    @override
    def tokens_per_row(self) -> int:
        rows = self.rows("train")
        return round(rows.num_tokens / len(rows))

    @override
    def describe(self) -> str:
        train, validation = (self.rows(split) for split in SPLITS)
        share = train.num_tokens / (len(train) * self.block_size)
        text = (
            f"{train.num_examples:,} training, {validation.num_examples:,} validation examples in"
            f" {len(train):,} and {len(validation):,} rows, which are {share:.0%} full"
        )
        fitted = [self._fitted(split)[1] for split in SPLITS]
        num_cut, num_dropped = (sum(f.num_cut for f in fitted), sum(f.num_dropped for f in fitted))
        if num_cut:
            text += f"; {num_cut:,} are truncated to {self.block_size} tokens"
        if num_dropped:
            text += f"; {num_dropped:,} are dropped, because no target is left"
        return text

    @override
    def prompt(self) -> str:
        """Return the text of the first validation example before its first target."""
        [example, *_] = self.rows("validation")[0]
        return str(self.tokenizer.decode(example.tokens[: example.is_target.index(True)]))

    def _path(self, split: Split) -> Path:
        key = cache_key(
            type(self.corpus).__name__,
            self.corpus.fingerprint(),
            fingerprint(self.tokenizer),
            self.tokenizer.chat_template,
        )
        return Path(self._cache_dir) / f"examples-{key}-{split}"

    def _fitted(self, split: Split) -> tuple[ExampleFile, Fitted]:
        own = split == "train" or self.corpus.has_validation
        file = ExampleFile(self._path(split if own else "train"))
        indices: Indices = np.arange(len(file))
        if not self.corpus.has_validation:
            indices = self._share(split, indices)
        return file, file.fit(indices, self.block_size)

    def _share(self, split: Split, indices: Indices) -> Indices:
        shuffled = np.random.default_rng(_SPLIT_SEED).permutation(indices)
        size = max(round(len(indices) * self._validation_fraction), 1)
        return np.sort(shuffled[:size] if split == "validation" else shuffled[size:])

    def _require(self, split: Split, num_rows: int) -> None:
        found = len(self.rows(split))
        if found < num_rows:
            packed = " (`data.packing=false` makes a row of every example)" if self.packing else ""
            raise ValueError(
                f"The {split} split has {found} rows of up to {self.block_size} tokens, and this"
                f" run needs at least {num_rows}. Use more examples, or lower `data.batch_size` or"
                f" `trainer.devices`{packed}."
            )


def _filler(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token; any would do, because padding is masked and never a target."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError(
        "The tokenizer has neither a padding token (`pad_token`) nor an end-of-text token"
        " (`eos_token`), and rows need one as padding. Save the tokenizer with one."
    )
