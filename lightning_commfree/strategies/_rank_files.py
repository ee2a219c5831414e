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
import pickle
import zipfile
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
        weights_only: as `Trainer.fit` got it; None stands for True.
    """

    def __init__(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> None:
        self._weights_only = weights_only is not False
        self._path = str(checkpoint_path)
        self._fs = get_filesystem(checkpoint_path)
        self._root = self._below(self._path, f"{_FOLDER}/{os.path.basename(self._path)}")

    def save(self, token: str, rank: int, state: dict[str, Any]) -> str:
        """Write this rank's part of the set `token`; return the set's place beside a checkpoint.

        Raises:
            RuntimeError: it cannot be written there.
        """
        file = f"{self._root}/{token}/rank_{rank}.pt"
        try:
            self._fs.makedirs(f"{self._root}/{token}", exist_ok=True)
            _atomic_save(state, file)
        except OSError as error:
            raise RuntimeError(
                f"Rank {rank} cannot write its part of a checkpoint to {file!r}:"
                f" {type(error).__name__}: {error}. Every rank writes beside the checkpoint, on its"
                " machine's own disk where none is shared. Give `ModelCheckpoint(dirpath=...)`, or"
                " the Trainer's `default_root_dir`, a folder that can be written by that path on"
                " every machine."
            ) from error
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
                state: dict[str, Any] = read_checkpoint(file, self._weights_only)
                return state
        return None

    def keep_only(self, token: str, spare: int = 0) -> None:
        """Remove the sets of earlier saves to this path; other ranks may do the same meanwhile.

        Args:
            token: of the latest save.
            spare: so many of the sets before it stay.
        """
        with suppress(OSError):  # no earlier save, or another rank is quicker
            folders = [str(folder).rstrip("/") for folder in self._fs.ls(self._root, detail=False)]
            earlier = [folder for folder in folders if os.path.basename(folder) != token]
            earlier.sort(key=lambda folder: folder.rpartition("-")[2])  # the time, in hexadecimals
            for folder in earlier[: len(earlier) - spare]:
                self._remove(folder)

    def remove(self) -> None:
        """Remove all sets of this checkpoint, and the common folder with the last one."""
        self._remove(self._root)
        with suppress(OSError):  # not empty: another checkpoint's sets, perhaps just being written
            self._fs.rmdir(os.path.dirname(self._root))

    def _remove(self, folder: str) -> None:
        # another rank on this disk may be quicker, which every file system says in its own way;
        # what stays is in nobody's way
        with suppress(OSError):
            self._fs.rm(folder, recursive=True)

    @staticmethod
    def _below(path: str, place: str) -> str:
        return f"{os.path.dirname(path) or '.'}/{place}"


def read_checkpoint(path: _PATH, weights_only: bool = True) -> Any:
    """Read what `torch.save` wrote, tensors on the CPU.

    Args:
        path: of the file.
        weights_only: whether no code may be run from the file.

    Raises:
        RuntimeError: the file is damaged, or holds what only unpickling loads; with its name and
            what to do.
    """
    try:
        return load_file(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError) or not _is_whole(path):
            raise damaged(path, error) from error
        raise RuntimeError(
            f"The checkpoint file {str(path)!r} holds more than tensors and plain values, and to"
            " read that may run code from it. If you trust it, pass `weights_only=False` to"
            f" `Trainer.fit`. What was found: {error}"
        ) from error


def _is_whole(path: _PATH) -> bool:
    """Return whether the file ends as `torch.save` ends one: a cut file is no archive."""
    with get_filesystem(path).open(str(path), "rb") as file:
        return zipfile.is_zipfile(file)


def damaged(path: _PATH, error: Exception) -> RuntimeError:
    """Return the error for a checkpoint that cannot be read."""
    return RuntimeError(
        f"The checkpoint file {str(path)!r} cannot be read: {type(error).__name__}: {error}. It was"
        " probably cut short, by a full disk or an interrupted copy. Nothing was loaded; resume"
        " from an earlier checkpoint."
    )
