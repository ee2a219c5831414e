from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.data.token_blocks import TokenBlocks, tokenize
from recipes.data.tokenizer import byte_tokenizer, train_bpe


class Documents:
    """A corpus of given documents; counts how often they are read."""

    def __init__(self, *documents: str) -> None:
        self.texts = documents
        self.reads = 0

    def documents(self, split):
        self.reads += 1
        return iter(self.texts)

    def fingerprint(self):
        return repr(self.texts)


class WideTokenizer:
    """A tokenizer with the vocabulary of a large model; every letter is one token."""

    is_fast = False
    eos_token_id = None

    def __len__(self):
        return 2**16 + 1

    def __call__(self, texts, **_):
        return {"input_ids": [[2**16 - ord(letter) for letter in text] for text in texts]}

    def get_vocab(self):
        return {"a": 1}


def test_documents_are_joined_by_the_end_of_text(tmp_path) -> None:
    tokenizer = byte_tokenizer()
    path = tokenize(Documents("abc", "", "d"), "train", tokenizer, str(tmp_path))
    end = tokenizer.eos_token_id
    a, b, c, d = (tokenizer(letter)["input_ids"][0] for letter in "abcd")
    assert TokenBlocks(path, 1).tokens.tolist() == [a, b, c, end, end, d, end]
    assert path.suffix == ".uint16"


def test_a_large_vocabulary_takes_four_bytes(tmp_path) -> None:
    path = tokenize(Documents("ab", "c"), "train", WideTokenizer(), str(tmp_path))
    assert path.suffix == ".uint32"
    assert TokenBlocks(path, 2).tokens.tolist() == [2**16 - ord(letter) for letter in "abc"]


def test_the_file_is_made_once_and_named_by_its_content(tmp_path, corpus) -> None:
    documents, cache = Documents("abc"), str(tmp_path / "cache")
    first = tokenize(documents, "train", byte_tokenizer(), cache)
    assert tokenize(documents, "train", byte_tokenizer(), cache) == first
    assert documents.reads == 1
    others = [
        tokenize(documents, "validation", byte_tokenizer(), cache),
        tokenize(documents, "train", train_bpe(corpus, 300, cache), cache),
        tokenize(Documents("abcd"), "train", byte_tokenizer(), cache),
    ]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 6, 12, 13, 14])
def test_every_token_but_the_first_is_a_target_once(tmp_path, num_tokens) -> None:
    np.arange(num_tokens, dtype="<u2").tofile(tmp_path / "tokens.uint16")
    blocks = TokenBlocks(tmp_path / "tokens.uint16", 4)
    assert len(blocks) == max(num_tokens - 1, 0) // 4
    rows: list[Tensor] = [blocks[i] for i in range(len(blocks))]
    assert all(row.shape == (5,) and row.dtype == torch.int64 for row in rows)
    targets = [int(token) for row in rows for token in row[1:]]
    assert targets == list(range(1, 1 + 4 * len(blocks)))
    assert all(row[0] + 1 == row[1] for row in rows), "an input stands before its target"
