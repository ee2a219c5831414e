"""A corpus as one long row of tokens in a memory-mapped file, read in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from recipes.data.cache import build_once, cache_key
from recipes.data.corpus import Corpus, Split

_DOCUMENTS_PER_CALL = 64  # the tokenizer works on them in parallel
_KEY_LETTERS = 16


def tokenize(
    corpus: Corpus, split: Split, tokenizer: PreTrainedTokenizerBase, cache_dir: str
) -> Path:
    """Return the file of a split's tokens, made now or found in the cache.

    The tokens of all documents follow each other, each document closed by the tokenizer's
    end-of-text token where it has one. The format is raw little-endian uint16, or uint32 (suffix
    `.uint32`) for vocabularies above 65536.

    Args:
        corpus: the text.
        split: "train" or "validation".
        tokenizer: any Hugging Face tokenizer.
        cache_dir: folder for the file, which is named by the content of corpus and tokenizer.
    """
    width = np.dtype("uint16" if len(tokenizer) <= 2**16 else "uint32")
    key = cache_key(corpus.fingerprint(), _fingerprint(tokenizer))[:_KEY_LETTERS]

    def build(path: Path) -> None:
        with path.open("wb") as file:
            for tokens in _token_rows(corpus.documents(split), tokenizer):
                file.write(np.asarray(tokens, width.newbyteorder("<")).tobytes())

    return build_once(Path(cache_dir) / f"tokens-{key}-{split}.{width.name}", build)


class TokenBlocks(Dataset[Tensor]):
    """Blocks of `block_size` + 1 tokens of a file that `tokenize` made.

    Neighbours share one token: block i reads tokens i*block_size to (i+1)*block_size inclusive.
    Inputs are all tokens but the last, targets all but the first, so every token but the file's
    first is a target exactly once. What is left at the end and fills no block is not used.

    Args:
        path: the file of tokens; its suffix names their width.
        block_size: predictions per block.

    Attributes:
        tokens: memory-mapped, shape (num_tokens,), uint16 or uint32.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        self.block_size = block_size
        dtype = np.dtype(path.suffix[1:]).newbyteorder("<")
        empty = path.stat().st_size == 0  # which cannot be mapped
        self.tokens = np.empty(0, dtype) if empty else np.memmap(path, dtype, mode="r")

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.block_size

    def __getitem__(self, index: int) -> Tensor:
        """Return one block, shape (block_size + 1,), int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block_size
        block = self.tokens[start : start + self.block_size + 1]
        return torch.from_numpy(block.astype(np.int64))


def _token_rows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    iterator = iter(documents)
    while batch := list(islice(iterator, _DOCUMENTS_PER_CALL)):
        # special tokens would be put into every document; `verbose` warns of documents longer than
        # a model's context
        encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        yield from (row + end for row in encoded)


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a key of what the tokenizer does: its definition, or for slow ones the vocabulary."""
    if tokenizer.is_fast:
        definition = tokenizer.backend_tokenizer.to_str()
    else:
        definition = [type(tokenizer).__name__, tokenizer.get_vocab()]
    return cache_key(definition, tokenizer.eos_token_id)
