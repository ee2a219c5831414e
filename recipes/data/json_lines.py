"""Files of JSON lines: one object a line, each with the place where it stands, for messages."""

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
        train: a path or glob (`~` and `**` are understood), or a list of them.
        validation: likewise; None: some of the training files' records are kept for validation.

    Attributes:
        has_validation: whether validation has files of its own.

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
        """Yield place ("FILE, line N") and object of every line that is not blank.

        Raises:
            ValueError: a line is no JSON object, a file is no UTF-8, or the split has no record.
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
        """Return a key of the files' bytes; dates do not matter."""
        return self._files.fingerprint()


def text_of(place: str, record: Record, key: str, setting: str) -> str:
    """Return a record's text under `key`.

    Args:
        place: where the record stands.
        record: an object of a line, or one in it.
        key: of the text.
        setting: configuration key that names `key`, for the message; empty if there is none.

    Raises:
        ValueError: the key is missing, or is no text.
    """
    hint = f" Other names are given by `{setting}`." if setting else ""
    if key not in record:
        keys = ", ".join(f"'{key}'" for key in record) or "none"
        raise ValueError(f"{place}: there is no key '{key}' among the keys {keys}.{hint}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{place}: '{key}' must be text, and it is {json.dumps(text)[:60]}.")
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
        raise ValueError(f"{place} or after: this is no UTF-8 text ({error.reason}).") from error
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is named .xz and is no xz file ({error}).") from error


def _parse(place: str, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: this is no JSON ({error.msg}, column {error.colno}). Every line must be a"
            " JSON object of its own, without a comma behind it."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{place}: a line must be a JSON object, as {{...}}, and this is {line.strip()[:60]}."
        )
    return record
