"""Read files of JSON lines, with the file and line of each object for error messages."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from recipes.data.corpus import Split, TextFiles

Record = Mapping[str, Any]


class JsonLines:
    """UTF-8 files with a JSON object on every line, plain or compressed with xz (`.xz`).

    Args:
        train: a path or glob (with `~` and `**`), or a list of them.
        validation: the same; None: some of the training files' records are held out.

    Attributes:
        has_validation: whether there are files for validation.

    Raises:
        FileNotFoundError: a path or glob matches no file.
        ValueError: a file is in both splits.
    """

    def __init__(
        self, train: str | Sequence[str], validation: str | Sequence[str] | None = None
    ) -> None:
        self.has_validation = validation is not None
        self._files = TextFiles(train, validation if validation is not None else [])

    def records(self, split: Split) -> Iterator[tuple[str, Record]]:
        """Yield the place ("FILE, line N") and the object of every line that is not blank.

        Raises:
            ValueError: a line is not a JSON object, a file is not UTF-8, or the split is empty.
        """
        found = False
        for path in self._files.files[split]:
            for place, line in _lines(path):
                found = True
                yield place, _parse(place, line)
        if not found:
            names = ", ".join(f"'{path}'" for path in self._files.files[split])
            raise ValueError(
                f"data.corpus.{split}: there is no line in {names}. Give a file with a JSON object"
                " on every line."
            )

    def fingerprint(self) -> str:
        """Return a hash of the files' bytes, independent of dates."""
        return self._files.fingerprint()


def text_of(place: str, record: Record, key: str, setting: str) -> str:
    """Return the text at `key` in a record.

    Args:
        place: of the record, for errors.
        record: the object of a line, or one inside it.
        key: of the text.
        setting: configuration key that changes `key`, for errors; empty if there is none.

    Raises:
        ValueError: the key is missing, or its value is not text.
    """
    hint = f" Other names are given by `{setting}`." if setting else ""
    if key not in record:
        keys = ", ".join(f"'{key}'" for key in record) or "none"
        raise ValueError(f"{place}: there is no key '{key}' among the keys {keys}.{hint}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{place}: '{key}' must be text, but it is {json.dumps(text)[:60]}.")
    return text


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    place = str(path)
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as raw:
            # utf-8-sig: some editors begin a file with a byte order mark
            for number, line in enumerate(TextIOWrapper(raw, encoding="utf-8-sig"), 1):
                place = f"{path}, line {number}"
                if line.strip():
                    yield place, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} or after: this is not UTF-8 text ({error.reason}).") from error
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is named .xz but is not an xz file ({error}).") from error


def _parse(place: str, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: this is not JSON ({error.msg}, column {error.colno}). Every line must be a"
            " JSON object of its own, without a comma after it."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{place}: a line must be a JSON object, as {{...}}, but this is {line.strip()[:60]}."
        )
    return record
