"""Sources of text: the user's files, the bundled Shakespeare, or a Markov chain."""

from __future__ import annotations

import glob
import hashlib
import lzma
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from lightning_commfree.comm.text import counted
from recipes.configuration.ranges import Seed
from recipes.data.cache import cache_key
from recipes.stages import Advance, stage

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

BUNDLED = Path(__file__).parent / "corpora"


class Corpus(Protocol):
    """Text in two splits, each a sequence of documents."""

    def documents(self, split: Split) -> Iterator[str]:
        """Yield the documents of a split, always in the same order."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the content; equal for corpora with the same documents."""
        ...


class TextFiles:
    """UTF-8 text files, plain or compressed with xz (`.xz`).

    A file is read as a whole. Split a file that is larger than memory, or read it line by line with
    `recipes.data.hub.HubText` (`data=hub data.corpus.path=text`).

    Args:
        train: a path or glob (with `~` and `**`), or a list of them.
        validation: the same; no file may be in both splits.
        document_separator: regular expression that splits a file into documents; None: each file is
            one document.

    Raises:
        FileNotFoundError: a path or glob matches no file.
        ValueError: a file is in both splits, or (from `documents`) is not UTF-8, or a damaged xz.
    """

    def __init__(
        self,
        train: str | Sequence[str],
        validation: str | Sequence[str],
        document_separator: str | None = None,
    ) -> None:
        self.document_separator = document_separator
        self._fingerprint: str | None = None  # computed on demand: it reads every byte
        self.files = find_splits("data.corpus", train, validation)

    def documents(self, split: Split) -> Iterator[str]:
        """Yield the documents of a split in order of their paths, without empty ones."""
        for path in self.files[split]:
            text = _read(path)
            parts = re.split(self.document_separator, text) if self.document_separator else [text]
            yield from (part for part in parts if part)

    def num_bytes(self, split: Split) -> int | None:
        """Return the size of a split's text in bytes; None if it is compressed."""
        paths = self.files[split]
        plain = all(path.suffix != ".xz" for path in paths)
        return sum(path.stat().st_size for path in paths) if plain else None

    def fingerprint(self) -> str:
        """Return a hash of the files' bytes and of the separator, independent of dates."""
        if self._fingerprint is None:
            sizes = (path.stat().st_size for paths in self.files.values() for path in paths)
            with stage("reading the text", sum(sizes)) as advance:
                digests = {
                    split: [digest(path, advance) for path in paths]
                    for split, paths in self.files.items()
                }
            self._fingerprint = cache_key(digests, self.document_separator)
        return self._fingerprint


class Shakespeare(TextFiles):
    """The bundled corpus: 39 works to train on; Hamlet, The Tempest and the Sonnets to validate."""

    # works also contain two blank lines: only a title marks the beginning of the next one
    SEPARATOR = r"\n{3}(?=[^\n]+\n+by William Shakespeare)"

    def __init__(self) -> None:
        folder = BUNDLED / "shakespeare"
        super().__init__(
            str(folder / "train.txt.xz"), str(folder / "validation.txt.xz"), self.SEPARATOR
        )


class MarkovChain:
    """Text with known entropy: letters from a first-order Markov chain.

    Each row of the transition matrix is drawn from a symmetric Dirichlet distribution. With the
    tokenizer `bytes` each letter is a token, and `entropy_nats` is the lowest possible expected
    loss, which a bigram model reaches.

    Args:
        num_states: letters in use, 2 to 26.
        train_characters: length of the training text.
        validation_characters: length of the validation text.
        concentration: of the Dirichlet distribution; small values make the text easy to predict.
        seed: of the matrix and the texts.

    Raises:
        ValueError: `num_states` is outside 2 to 26.
    """

    def __init__(
        self,
        num_states: Annotated[int, Field(ge=2, le=26)] = 16,
        train_characters: PositiveInt = 400_000,
        validation_characters: PositiveInt = 40_000,
        concentration: PositiveFloat = 0.3,
        seed: Seed = 0,
    ) -> None:
        if not 2 <= num_states <= 26:
            raise ValueError(
                f"num_states={num_states} must be within 2 to 26: each state is one letter."
            )
        self._settings = (num_states, train_characters, validation_characters, concentration, seed)
        self._lengths = {"train": train_characters, "validation": validation_characters}
        self._seed = seed
        rng = np.random.default_rng(seed)
        self.transitions_SS = rng.dirichlet([concentration] * num_states, num_states)  # row: from

    @property
    def entropy_nats(self) -> float:
        """Entropy rate of the chain in nats per letter, under its stationary distribution."""
        num_states = len(self.transitions_SS)
        # stationary: pi (P - 1) = 0 and sum(pi) = 1, as one overdetermined linear system
        system = np.vstack([self.transitions_SS.T - np.eye(num_states), np.ones(num_states)])
        target = np.append(np.zeros(num_states), 1.0)
        stationary_S = np.linalg.lstsq(system, target, rcond=None)[0]
        positive_SS = np.where(self.transitions_SS > 0, self.transitions_SS, 1.0)  # 0 log 0 = 0
        row_entropies_S = -(self.transitions_SS * np.log(positive_SS)).sum(axis=1)
        return float(stationary_S @ row_entropies_S)

    def documents(self, split: Split) -> Iterator[str]:
        """Yield the only document of the split."""
        rng = np.random.default_rng([self._seed, 1 if split == "train" else 2])
        num_states = len(self.transitions_SS)
        rows = [list(accumulate(row)) for row in self.transitions_SS.tolist()]
        state, letters = 0, []
        for uniform in rng.random(self._lengths[split]).tolist():
            row = rows[state]
            # rounding may leave the last sum slightly below 1: the last letter takes the rest
            state = next((i for i, bound in enumerate(row) if uniform < bound), num_states - 1)
            letters.append(chr(ord("a") + state))
        yield "".join(letters)

    def fingerprint(self) -> str:
        """Return a hash of the settings, which determine the text."""
        return cache_key("markov", self._settings)


def find_splits(
    key: str, train: str | Sequence[str], validation: str | Sequence[str]
) -> dict[Split, list[Path]]:
    """Return the files of both splits, sorted by their paths.

    Args:
        key: of the configuration section with `train` and `validation`, for errors.
        train: a path or glob (with `~` and `**`), or a list of them.
        validation: the same.

    Raises:
        FileNotFoundError: a path or glob matches no file.
        ValueError: a file is in both splits.
    """
    files: dict[Split, list[Path]] = {
        "train": _find(f"{key}.train", train),
        "validation": _find(f"{key}.validation", validation),
    }
    both = set(files["train"]) & set(files["validation"])
    if both:
        raise ValueError(
            f"The training and validation splits share {counted(len(both), 'file')}, for example"
            f" '{min(both)}'. A validation loss on training text would be meaningless. Give each"
            f" file to one split (`{key}.train`, `{key}.validation`)."
        )
    return files


def _find(key: str, patterns: str | Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        expanded = str(Path(pattern).expanduser())
        found = [Path(name) for name in glob.glob(expanded, recursive=True) if Path(name).is_file()]
        if not found:
            raise FileNotFoundError(
                f"{key}: '{pattern}' matches no file (relative to '{Path.cwd()}'). Give a file, or"
                " a glob in quotes, such as 'books/**/*.txt'."
            )
        files += found
    return sorted({path.resolve() for path in files})


def digest(path: Path, advance: Advance | None = None) -> str:
    """Return a hash of a file's bytes and of its suffix, which selects how they are read.

    Args:
        path: of the file.
        advance: called with the number of bytes read.
    """
    found = hashlib.sha256(path.suffix.encode())
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            found.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return found.hexdigest()


def _read(path: Path) -> str:
    raw = path.read_bytes()
    try:
        raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
        return raw.decode("utf-8")
    except lzma.LZMAError as error:
        raise ValueError(f"'{path}' is not a complete xz file: {error}.") from error
    except UnicodeDecodeError as error:
        unpacked = " of its unpacked content" if path.suffix == ".xz" else ""
        raise ValueError(
            f"'{path}' is not UTF-8: byte 0x{raw[error.start]:02x} at offset"
            f" {error.start}{unpacked} ({error.reason}). Convert it, for example by `iconv -f"
            " latin1 -t utf-8`."
        ) from error
