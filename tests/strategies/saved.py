"""What stands in a checkpoint, and beside it, of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_commfree.resume.rank_files import FOLDER, SavedParts


def parts_of(path: Path) -> SavedParts:
    """Return the parts of a checkpoint's ranks."""
    return SavedParts(path, torch.load(path, weights_only=True), None)


def part_of(path: Path, rank: int) -> Any:
    """Return what a rank had saved with a checkpoint."""
    return parts_of(path).load(rank)


def sets_of(path: Path) -> Path:
    """Return the folder with the sets of ranks' files of a checkpoint."""
    return path.parent / FOLDER / path.name


def file_of(path: Path, rank: int) -> Path:
    """Return a rank's file of a checkpoint."""
    (file,) = sets_of(path).glob(f"*/rank_{rank}.pt")
    return file
