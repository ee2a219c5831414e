"""The rank states of a checkpoint, in it and in the files beside it, and warnings of a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.resume.exact import Save
from lightning_commfree.resume.rank_files import FOLDER


def part_of(path: Path, rank: int) -> Any:
    """Return a rank's own state in a checkpoint."""
    return Save(path, torch.load(path, weights_only=True), None).own_state(rank)


def sets_of(path: Path) -> Path:
    """Return the folder of a checkpoint's rank files, with a folder for each save."""
    return path.parent / FOLDER / path.name


def file_of(path: Path, rank: int) -> Path:
    """Return a rank's file of a checkpoint."""
    (file,) = sets_of(path).glob(f"*/rank_{rank}.pt")
    return file


@contextmanager
def resume_warnings() -> Iterator[list[str]]:
    """Collect what an inexact resume says, on every rank and not on rank 0 alone."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_commfree.resume.exact.rank_zero_warn", said.append)
        yield said


@contextmanager
def resume_words() -> Iterator[list[str]]:
    """Collect all that a resume says, also what it restored, on every rank."""
    with resume_warnings() as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_commfree.resume.exact.rank_zero_info", said.append)
        yield said
