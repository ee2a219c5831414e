"""Ready-made files of tokens, as nanoGPT and llm.c write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from recipes.configuration.ranges import Seed
from recipes.data.cache import build_once, cache_key
from recipes.data.corpus import SPLITS, Split, find_splits
from recipes.data.token_blocks import JoinedBlocks, TokenBlocks
from recipes.data.token_data import BlockDataModule
from recipes.stages import stage

DTYPES = ("uint16", "uint32")
# llm.c's files, such as its FineWeb for GPT-2, begin with 256 int32: a magic number that gives the
# width of a token, a version, the number of tokens, zeros
HEADER_BYTES = 1024
_WIDTH_OF_HEADER = {20240520: "uint16", 20240801: "uint32"}


class TokenShards(BlockDataModule):
    """Blocks of memory-mapped files of tokens, which may be larger than memory.

    The files contain little-endian unsigned integers, after llm.c's header, which is recognized, or
    without one (nanoGPT). The first use of a file checks every id: on a GPU an id without an
    embedding would end a run in the middle with an obscure error.

    Args:
        train: a path or glob (with `~` and `**`), or a list of them; read in order of their paths.
        validation: the same.
        tokenizer: the one that produced the tokens.
        cache_dir: folder that remembers which files have been checked.
        dtype: of the tokens in files without a header, "uint16" or "uint32".
        block_size: as for `BlockDataModule`.
        batch_size: as for `BlockDataModule`.
        num_workers: as for `BlockDataModule`.
        seed: as for `BlockDataModule`.

    Raises:
        FileNotFoundError: a path or glob matches no file.
        ValueError: a file is in both splits; or (from `prepare_data`) an id is too large for the
            tokenizer, or a file's size is not a whole number of tokens.
    """

    def __init__(
        self,
        train: str | Sequence[str],
        validation: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cache_dir: str,
        dtype: str = "uint16",
        block_size: PositiveInt = 128,
        batch_size: PositiveInt = 8,
        num_workers: NonNegativeInt = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(tokenizer, block_size, batch_size, num_workers, seed)
        if dtype not in DTYPES:
            raise ValueError(f"data.dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
        self._files = find_splits("data", train, validation)
        self._dtype = dtype
        self._cache_dir = Path(cache_dir)

    @override
    def blocks(self, split: Split) -> JoinedBlocks:
        """Return the blocks of a split, none of which crosses the end of a file."""
        return JoinedBlocks([self._open(path) for path in self._files[split]])

    @override
    def prepare_data(self) -> None:
        for split in SPLITS:
            for path in self._files[split]:
                self._check_ids(path)

    def _open(self, path: Path) -> TokenBlocks:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = int.from_bytes(file.read(4), "little")
        dtype, offset = _WIDTH_OF_HEADER.get(first, self._dtype), 0
        if first in _WIDTH_OF_HEADER:
            offset = HEADER_BYTES
        if size < offset or (size - offset) % np.dtype(dtype).itemsize:
            raise ValueError(
                f"'{path}' has {size} bytes, which is not a whole number of {dtype} tokens"
                f"{' after its header' if offset else ''}. It is truncated, or data.dtype must be"
                f" another one of {', '.join(DTYPES)}."
            )
        return TokenBlocks(path, self.block_size, dtype, offset)

    def _check_ids(self, path: Path) -> None:
        tokens, size = self._open(path).tokens, len(self.tokenizer)
        if size > np.iinfo(tokens.dtype).max or not len(tokens):
            return
        status = path.stat()
        key = cache_key(str(path), status.st_size, status.st_mtime_ns, str(tokens.dtype))

        def build(file: Path) -> None:
            with stage(f"looking at the tokens of {path.name}"):
                file.write_text(str(tokens.max()))  # numpy reads the mapped file in chunks

        largest = int(build_once(self._cache_dir / f"largest-id-{key}.txt", build).read_text())
        if largest >= size:
            raise ValueError(
                f"'{path}' has the token {largest}, and the tokenizer has ids 0 to {size - 1}. Give"
                " the tokenizer that made the file (tokenizer=pretrained"
                " tokenizer.name_or_path=...), or its data.dtype."
            )
