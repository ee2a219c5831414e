"""Tokenize a corpus into a memory-mapped file and read it in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset
from transformers import PreTrainedTokenizerBase

from recipes.data.cache import build_once, cache_key
from recipes.data.corpus import Corpus, Split, TextFiles
from recipes.stages import Advance, stage

_DOCUMENTS_PER_CALL = 64  # documents that the tokenizer processes in parallel
_KEY_LETTERS = 16
_PIECE = 2**22  # tokens


def tokenize(
    corpus: Corpus, split: Split, tokenizer: PreTrainedTokenizerBase, cache_dir: str
) -> Path:
    """Return the file with a split's tokens, from the cache or tokenized now.

    The documents follow each other, each ended by the tokenizer's end-of-text token if it has one.
    The format is raw little-endian uint16, or uint32 (suffix
    `.uint32`) for vocabularies above 65536.

    Args:
        corpus: the text.
        split: "train" or "validation".
        tokenizer: any Hugging Face tokenizer.
        cache_dir: folder for the file, whose name hashes the content of corpus and tokenizer.
    """
    width = np.dtype("uint16" if len(tokenizer) <= 2**16 else "uint32")
    key = cache_key(corpus.fingerprint(), fingerprint(tokenizer))[:_KEY_LETTERS]

    def build(path: Path) -> None:
        size = corpus.num_bytes(split) if isinstance(corpus, TextFiles) else None
        with path.open("wb") as file, stage(f"tokenizing the {split} split", size) as advance:
            for tokens in _token_rows(corpus.documents(split), tokenizer, advance):
                file.write(np.asarray(tokens, width.newbyteorder("<")).tobytes())

    return build_once(Path(cache_dir) / f"tokens-{key}-{split}.{width.name}", build)


class TokenBlocks(Dataset[Tensor]):
    """Blocks of `block_size` + 1 tokens from a file as `tokenize` writes it.

    Neighbours share one token: block i reads tokens i*block_size to (i+1)*block_size inclusive.
    Inputs are all tokens but the last, targets all but the first, so every token but the file's
    first is a target exactly once. An incomplete block at the end is not used.

    Args:
        path: the file of tokens, little-endian.
        block_size: predictions per block.
        dtype: of a token, "uint16" or "uint32"; None: determined by the suffix.
        offset: bytes before the first token.

    Attributes:
        tokens: memory-mapped, shape (num_tokens,), uint16 or uint32.
        parts: this file alone; `JoinedBlocks` has several.
    """

    def __init__(
        self, path: Path, block_size: int, dtype: str | None = None, offset: int = 0
    ) -> None:
        self.block_size = block_size
        self._made_of = (path, block_size, dtype, offset)
        width = np.dtype(dtype or path.suffix[1:]).newbyteorder("<")
        empty = path.stat().st_size == offset  # an empty file cannot be mapped
        self.tokens: np.ndarray[Any, Any] = (
            np.empty(0, width) if empty else np.memmap(path, width, mode="r", offset=offset)
        )
        self.parts = [self]

    def __reduce__(self) -> tuple[type[TokenBlocks], tuple[Any, ...]]:
        # pickling a memory map for a spawned process would copy its whole content
        return TokenBlocks, self._made_of

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.block_size

    def __getitem__(self, index: int) -> Tensor:
        """Return one block, shape (block_size + 1,), int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block_size
        block = self.tokens[start : start + self.block_size + 1]
        return torch.from_numpy(block.astype(np.int64))


class JoinedBlocks(ConcatDataset[Tensor]):
    """The blocks of several files in turn; no block crosses the end of a file.

    Args:
        parts: the files, at least one.
    """

    def __init__(self, parts: Sequence[TokenBlocks]) -> None:
        super().__init__(parts)
        self.parts = list(parts)
        self.block_size = parts[0].block_size


Blocks = TokenBlocks | JoinedBlocks


def num_tokens(blocks: Blocks) -> int:
    """Return the number of tokens in all files together."""
    return sum(len(part.tokens) for part in blocks.parts)


def count_tokens(
    rows: Iterable[np.ndarray[Any, Any]], vocab_size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Count how often each id occurs; int64 of shape (vocab_size,).

    Args:
        rows: of tokens, each shape (num_tokens,); memory-mapped ones may be larger than memory.
        vocab_size: larger than every id.
    """
    counts_V = np.zeros(vocab_size, np.int64)
    for row in rows:
        # in chunks: numpy counts in an int64 copy, four times as large
        for start in range(0, len(row), _PIECE):
            counts_V += np.bincount(row[start : start + _PIECE], minlength=vocab_size)
    return counts_V


def _token_rows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, advance: Advance
) -> Iterator[list[int]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    iterator = iter(documents)
    while batch := list(islice(iterator, _DOCUMENTS_PER_CALL)):
        # special tokens would be added to every document; `verbose` warns of documents longer than
        # a model's context
        encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        advance(sum(len(document.encode()) for document in batch))
        yield from (row + end for row in encoded)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the tokenizer's definition, or of its vocabulary if it is a slow one."""
    if tokenizer.is_fast:
        definition = tokenizer.backend_tokenizer.to_str()
    else:
        definition = [type(tokenizer).__name__, tokenizer.get_vocab()]
    return cache_key(definition, tokenizer.eos_token_id)
