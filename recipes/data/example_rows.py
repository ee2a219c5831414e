"""Store tokenized examples in files, pack them into rows, and collate rows into batches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.cache import build_once
from recipes.data.examples import Example
from recipes.stages import stage

Indices = NDArray[np.int64]
Row = list[Example]

NO_TARGET = -100  # transformers' label of a position that is not a target
_FILES = ("tokens", "is_target", "ends")


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Write examples into a new folder; after an error no folder is left."""

    def build(folder: Path) -> None:
        folder.mkdir()
        tokens: list[NDArray[np.uint32]] = []
        is_target: list[NDArray[np.bool_]] = []
        with stage("tokenizing the examples"):
            for example in examples:
                tokens.append(np.asarray(example.tokens, np.uint32))
                is_target.append(np.asarray(example.is_target, np.bool_))
        ends = np.cumsum([len(row) for row in tokens], dtype=np.int64)
        columns: list[NDArray[Any]] = [np.concatenate(tokens), np.concatenate(is_target), ends]
        for name, column in zip(_FILES, columns, strict=True):
            np.save(folder / f"{name}.npy", column)

    build_once(path, build)


@dataclass(frozen=True)
class Fitted:
    """The examples that fit a context and still contain a target."""

    kept: Indices  # examples with a target within the context
    num_cut: int  # kept, but truncated
    num_dropped: int  # dropped


class ExampleFile:
    """Memory-mapped examples, written by `write_examples`.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        tokens, is_target, ends = (np.load(path / f"{name}.npy", mmap_mode="r") for name in _FILES)
        self._tokens, self._is_target = tokens, is_target
        self._ends: Indices = np.asarray(ends)
        self._starts: Indices = np.concatenate([[0], self._ends[:-1]])

    def __reduce__(self) -> tuple[type[ExampleFile], tuple[Path]]:
        # pickling a memory map for a spawned process would copy its whole content
        return ExampleFile, (self._path,)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> Indices:
        """Number of tokens of each example, before truncation."""
        return self._ends - self._starts

    def example(self, index: int, block_size: int) -> Example:
        """Return an example, truncated to `block_size` tokens."""
        start = int(self._starts[index])
        stop = min(int(self._ends[index]), start + block_size)
        return Example(self._tokens[start:stop].tolist(), self._is_target[start:stop].tolist())

    def fit(self, indices: Indices, block_size: int) -> Fitted:
        """Return which of the examples `indices` have a target within `block_size` tokens.

        The first token is never a target: nothing precedes it.
        """
        before = np.concatenate([[0], np.cumsum(self._is_target, dtype=np.int64)])
        starts, ends = self._starts[indices], self._ends[indices]
        stops = np.minimum(ends, starts + block_size)
        has_target = before[stops] > before[np.minimum(starts + 1, stops)]
        num_cut = int((has_target & (stops < ends)).sum())
        return Fitted(indices[has_target], num_cut, int((~has_target).sum()))


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack whole examples into rows: the longest first, each into the fullest row with room.

    Args:
        lengths: of the examples, each at most `capacity`.
        capacity: tokens of a row.

    Returns:
        The examples of each row; deterministic.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        found = bisect_left(free, (lengths[index], 0))
        if found < len(free):
            room, row = free.pop(found)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > lengths[index]:
            insort(free, (room - lengths[index], row))
    return rows


class ExampleRows(Dataset[Row]):
    """Rows of whole examples, at most `block_size` tokens together.

    Args:
        file: of the examples.
        kept: examples to use, each with a target.
        block_size: tokens of a row, at most.
        packing: let several examples share a row.
    """

    def __init__(self, file: ExampleFile, kept: Indices, block_size: int, packing: bool) -> None:
        self._file, self._kept, self._block_size = file, kept, block_size
        self.num_examples = len(kept)
        lengths = np.minimum(file.lengths[kept], block_size).tolist()
        self.num_tokens = sum(lengths)
        self._rows = pack(lengths, block_size) if packing else [[i] for i in range(len(kept))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Return the examples of a row."""
        return [self._file.example(int(self._kept[i]), self._block_size) for i in self._rows[index]]


class Collator:
    """Collate B rows into a batch, padded on the right to the T tokens of the longest.

    A batch has `input_ids` and `labels`, int64 of shape (B, T); a label is the position's own
    token, -100 where it is not a target. Packed rows come with `position_ids`, which restart at
    every example and at the padding; transformers keeps the examples apart by them. Other rows come
    with `attention_mask`, 0 for the padding.

    Args:
        packing: rows may have several examples.
        filler: padding token.
    """

    def __init__(self, packing: bool, filler: int) -> None:
        self._packing, self._filler = packing, filler

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the batch of some rows."""
        length = max(sum(len(example.tokens) for example in row) for row in rows)
        shape = (len(rows), length)
        tokens_BT = torch.full(shape, self._filler)
        labels_BT = torch.full(shape, NO_TARGET)
        positions_BT = torch.zeros(shape, dtype=torch.int64)
        mask_BT = torch.zeros(shape, dtype=torch.int64)
        for b, row in enumerate(rows):
            start = 0
            for example in row:
                tokens = torch.tensor(example.tokens)
                # the token before an example's first one belongs to another example
                is_target = torch.tensor([False, *example.is_target[1:]])
                part = slice(start, start + len(tokens))
                tokens_BT[b, part] = tokens
                labels_BT[b, part] = tokens.masked_fill(~is_target, NO_TARGET)
                positions_BT[b, part] = torch.arange(len(tokens))
                mask_BT[b, part] = 1
                start = part.stop
            positions_BT[b, start:] = torch.arange(length - start)
        batch = {"input_ids": tokens_BT, "labels": labels_BT}
        kept_apart = (
            {"position_ids": positions_BT} if self._packing else {"attention_mask": mask_BT}
        )
        return {**batch, **kept_apart}
