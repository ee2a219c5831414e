"""A corpus from the Hugging Face `datasets` library; may be larger than memory."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from recipes.data.cache import cache_key
from recipes.data.corpus import Split, digest


class HubText:
    """The texts of a dataset, streamed one document at a time.

    The stream is tokenized once into a memory-mapped file (`token_blocks`) instead of training from
    it directly, because a file can be shuffled in every epoch and resumed exactly at any step
    on any number of ranks. With a commit as `revision` later runs need no network and see the same
    data. The costs are disk space, two or four bytes per token, and that training starts only after
    the last document; `max_documents` limits both.

    Args:
        path: an id on the hub, a local folder, or with `data_files` a format of the library such as
            "json", "text" or "parquet".
        name: of the dataset's configuration, if it has several.
        data_files: a path or glob, or a list of them, for each split.
        train: name of the split to train on.
        validation: name of the split to validate on; None: the first `validation_documents` of the
            training split, which are then excluded from training.
        validation_documents: limit for validation.
        max_documents: limit for training; None: all.
        text_column: column with the text.
        revision: commit, branch or tag on the hub; None: the newest. Every start asks the hub for
            the commit, unless this already is one (40 hexadecimal digits).

    Raises:
        ImportError: `datasets` is not installed.
        FileNotFoundError: an entry of `data_files` matches no file.
        ValueError: a number of documents is not positive; or (from `documents` and `fingerprint`)
            the dataset cannot be read, or lacks the column.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        data_files: Mapping[str, str | Sequence[str]] | None = None,
        train: str = "train",
        validation: str | None = None,
        validation_documents: PositiveInt = 1000,
        max_documents: PositiveInt | None = None,
        text_column: str = "text",
        revision: str | None = None,
    ) -> None:
        counts = {"validation_documents": validation_documents, "max_documents": max_documents}
        for key, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"data.corpus.{key}={count} must be positive.")
        _library()
        self._path, self._name, self._revision = path, name, revision
        self._files = None if data_files is None else _find(data_files)
        self._splits = {"train": train, "validation": validation or train}
        self._held_out = 0 if validation else validation_documents
        self._counts = {"train": max_documents, "validation": validation_documents}
        self._column = text_column
        self._fingerprint: str | None = None  # computed on demand: it reads files or asks the hub

    def documents(self, split: Split) -> Iterator[str]:
        """Yield the documents of a split in the dataset's order, without empty ones."""
        start = self._held_out if split == "train" else 0
        count = self._counts[split]
        rows = islice(self._rows(split), start, None if count is None else start + count)
        for row in rows:
            text = row.get(self._column)
            if not isinstance(text, str):
                raise ValueError(
                    f"'{self._path}' has no text in data.corpus.text_column='{self._column}'. Its"
                    f" columns: {', '.join(f'{k} ({type(v).__name__})' for k, v in row.items())}."
                )
            if text:
                yield text

    def fingerprint(self) -> str:
        """Return a hash of the bytes of local files, or of the commit on the hub."""
        if self._fingerprint is None:
            self._fingerprint = cache_key(
                self._content(),
                self._name,
                self._splits,
                self._held_out,
                self._counts,
                self._column,
            )
        return self._fingerprint

    def _rows(self, split: Split) -> Iterator[dict[str, Any]]:
        try:
            yield from _library().load_dataset(
                self._path,
                self._name,
                data_files=self._files,
                split=self._splits[split],
                revision=self._revision,
                streaming=True,
            )
        except (OSError, ValueError, _library().exceptions.DatasetsError) as error:
            raise self._unreadable(error) from error

    def _content(self) -> object:
        if self._files is not None:
            return [self._path, {k: [digest(Path(f)) for f in v] for k, v in self._files.items()}]
        if Path(self._path).is_dir():
            files = sorted(file for file in Path(self._path).rglob("*") if file.is_file())
            return [[str(file.relative_to(self._path)), digest(file)] for file in files]
        if re.fullmatch("[0-9a-f]{40}", self._revision or ""):
            return [self._path, self._revision]
        from huggingface_hub import HfApi  # comes with `datasets`

        try:
            return [self._path, HfApi().dataset_info(self._path, revision=self._revision).sha]
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ValueError:
        return ValueError(
            f"data.corpus.path='{self._path}' could not be read by `datasets`:"
            f" {type(error).__name__}: {error}. An id needs a network and HF_HUB_OFFLINE unset;"
            " without one, give the commit that was tokenized before as data.corpus.revision, all"
            " 40 digits, or a folder, or json, text or parquet with data.corpus.data_files."
        )


def _library() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "data=hub needs the library `datasets`: pip install 'datasets>=3.0', or this project's"
            " extra `recipes`."
        ) from error
    return datasets


def _find(data_files: Mapping[str, str | Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for split, patterns in data_files.items():
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            files = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
            if not files:
                raise FileNotFoundError(
                    f"data.corpus.data_files.{split}: '{pattern}' matches no file (relative to"
                    f" '{Path.cwd()}')."
                )
            found.setdefault(split, []).extend(files)
    return found
