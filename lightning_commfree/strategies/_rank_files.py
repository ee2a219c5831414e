"""What only one rank knows, in files of its own beside a checkpoint.

Replicas differ: each has its own weights, optimizer, random numbers, data position. A Lightning
checkpoint has room for one of them, and to gather all on rank 0 would send more than the training
does. So every rank writes its own part, and the checkpoint names the set that belongs to it:

    checkpoints/last.ckpt                                  a normal Lightning checkpoint
    checkpoints/replicas/last.ckpt/120-5f3a.../rank_3.pt   rank 3's part of the save at step 120

Whatever dies in between, a checkpoint and its set match: the set of the new save is complete before
the checkpoint is replaced, and the set of the old one is removed after that. Ranks that share no
disk find their own part on their own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from lightning.fabric.utilities.cloud_io import _atomic_save, get_filesystem
from lightning.fabric.utilities.cloud_io import _load as load_file
from lightning.fabric.utilities.types import _PATH

_FOLDER = "replicas"


class RankFiles:
    """The sets of one checkpoint.

    Args:
        checkpoint_path: of the `.ckpt`; local or whatever fsspec opens.
    """

    def __init__(self, checkpoint_path: _PATH) -> None:
        self._path = str(checkpoint_path)
        self._fs = get_filesystem(checkpoint_path)
        self._root = self._below(self._path, f"{_FOLDER}/{os.path.basename(self._path)}")

    def save(self, token: str, rank: int, state: dict[str, Any]) -> str:
        """Write this rank's part of the set `token`; return the set's place beside a checkpoint."""
        self._fs.makedirs(f"{self._root}/{token}", exist_ok=True)
        _atomic_save(state, f"{self._root}/{token}/rank_{rank}.pt")
        return f"{_FOLDER}/{os.path.basename(self._path)}/{token}"

    def load(self, place: str, rank: int) -> dict[str, Any] | None:
        """Return this rank's part of the set at `place`, None where there is none.

        A link to a checkpoint finds the set beside what it points to.

        Raises:
            RuntimeError: the file is there and cannot be read.
        """
        for path in dict.fromkeys((self._path, os.path.realpath(self._path))):
            file = f"{self._below(path, place)}/rank_{rank}.pt"
            if self._fs.exists(file):
                state: dict[str, Any] = read_checkpoint(file)
                return state
        return None

    def keep_only(self, token: str) -> None:
        """Remove the sets of earlier saves to this path; other ranks may do the same meanwhile."""
        with suppress(FileNotFoundError):  # no earlier save, or another rank is quicker
            for folder in self._fs.ls(self._root, detail=False):
                if os.path.basename(str(folder).rstrip("/")) != token:
                    self._remove(str(folder))

    def remove(self) -> None:
        """Remove all sets of this checkpoint, and the common folder with the last one."""
        self._remove(self._root)
        with suppress(OSError):  # not empty: another checkpoint's sets, perhaps just being written
            self._fs.rmdir(os.path.dirname(self._root))

    def _remove(self, folder: str) -> None:
        with suppress(FileNotFoundError):  # another rank on this disk may be quicker
            self._fs.rm(folder, recursive=True)

    @staticmethod
    def _below(path: str, place: str) -> str:
        return f"{os.path.dirname(path) or '.'}/{place}"


def read_checkpoint(path: _PATH) -> Any:
    """Read what `torch.save` wrote, tensors on the CPU, without running code from the file.

    Raises:
        RuntimeError: the file is damaged, with its name and what to do.
    """
    try:
        return load_file(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise damaged(path, error) from error


def damaged(path: _PATH, error: Exception) -> RuntimeError:
    """Return the error for a checkpoint that cannot be read."""
    return RuntimeError(
        f"The checkpoint file {str(path)!r} cannot be read: {type(error).__name__}: {error}. It was"
        " probably cut short, by a full disk or an interrupted copy. Nothing was loaded; resume"
        " from an earlier checkpoint."
    )
