"""Rank files: each rank's own state, in one file per rank beside the checkpoint.

Replicas differ in weights, optimizer state, RNG state and data position. A Lightning checkpoint can
contain only one rank's state, and gathering all states on rank 0 would send more data than training
does. So the checkpoint contains rank 0's own state, and every other rank writes a file:

    checkpoints/last.ckpt                                   the checkpoint, with rank 0's own state
    checkpoints/.commfree/last.ckpt/120-5f3a.../rank_3.pt   rank 3's own state, saved at step 120

Copy and move the `.commfree` folder together with the checkpoints. It is hidden: `ls`, `glob("*")`
and `cp folder/*` skip it, but `os.listdir` does not. A single-rank job has no such folder.

A checkpoint always matches its rank files, even if a process dies during a save: new rank files are
completed before the checkpoint is replaced, and old ones are removed afterwards. Ranks without a
shared disk use a file on their own machine; `copies` sends it if another rank needs it. Every file
contains its rank, the number of ranks and the token of its save, so that swapped or leftover files
are rejected.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_commfree.resume.files import FilePath, read_verified, write_atomic

FOLDER = ".commfree"


class Owner(NamedTuple):
    """The rank and the save to which a rank file belongs."""

    rank: int
    ranks: int
    token: str

    def __str__(self) -> str:
        return f"the state of rank {self.rank} of {self.ranks} in save {self.token!r}"


class RankFiles:
    """Access to the rank files of one checkpoint path, with a folder for each save to that path.

    `checkpoint_path` may be a local path or any URL that fsspec can open.
    """

    def __init__(self, checkpoint_path: FilePath) -> None:
        self._path = str(checkpoint_path)
        self._fs, _ = url_to_fs(self._path)
        self._name = f"{FOLDER}/{os.path.basename(self._path)}"
        self._root = _sibling_path(self._path, self._name)

    def folder(self, token: str) -> str:
        """Return the folder for a save's rank files, relative to the checkpoint's folder."""
        return f"{self._name}/{token}"

    def write(self, owner: Owner, state: dict[str, Any]) -> None:
        """Write a rank's state to its rank file.

        Raise a RuntimeError if the file cannot be written.
        """
        file = file_of_rank(self._path, self.folder(owner.token), owner.rank)
        try:
            write_atomic({**owner._asdict(), "state": state}, file)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"Rank {owner.rank} cannot write its rank file for a checkpoint ({file!r}): {error}"
                " Every rank writes a file next to the checkpoint, so the checkpoint's folder must"
                " be writable at the same path on every machine; the disk may be shared or local."
            ) from error

    def read(self, owner: Owner, folder: str, weights_only: bool = True) -> Any:
        """Read a rank's state from its rank file, or return None if the file is missing.

        `folder` is the folder recorded in the checkpoint, relative to the checkpoint's own folder.
        With `weights_only`, reject objects that could run code when loaded. Raise a RuntimeError if
        the file is damaged, or is from another rank or save.
        """
        file = self.find(folder, owner.rank)
        if file is None:
            return None
        saved = read_verified(file, weights_only)
        if not isinstance(saved, dict) or not {*Owner._fields, "state"} <= saved.keys():
            raise _rejected(file, "it is not a rank file")
        found = Owner(*(saved[field] for field in Owner._fields))
        if found != owner:
            raise _rejected(file, f"it contains {found}, but {owner} is needed")
        return saved["state"]

    def find(self, folder: str, rank: int) -> str | None:
        """Return the path of a rank's file, or None if the file is missing.

        Raise a RuntimeError if `folder`, as recorded in the checkpoint, cannot be a folder of rank
        files.
        """
        parts = PurePosixPath(folder).parts
        if len(parts) != 3 or parts[0] != FOLDER or ".." in parts:
            raise RuntimeError(
                f"The checkpoint {self._path!r} says its rank files are in {folder!r}, but they"
                f" must be in '{FOLDER}/' next to it, so the checkpoint was modified after it was"
                " saved. Nothing was loaded; resume from another checkpoint."
            )
        # if the path is a link, the files may be beside the checkpoint that it points to
        for path in dict.fromkeys((self._path, os.path.realpath(self._path))):
            file = file_of_rank(path, folder, rank)
            if self._fs.exists(file):
                return file
        return None

    def remove_older(self, token: str, keep: int = 0) -> None:
        """Remove the rank files of previous saves to this path, except the latest `keep` saves.

        Files of the save `token` are also kept. Several ranks may safely do this at the same time.
        """
        with suppress(OSError):  # no earlier save, or another rank was faster
            folders = [str(folder).rstrip("/") for folder in self._fs.ls(self._root, detail=False)]
            earlier = [folder for folder in folders if os.path.basename(folder) != token]
            earlier.sort(key=lambda folder: folder.rpartition("-")[2])  # by time, in hexadecimal
            for folder in earlier[: len(earlier) - keep]:
                self._remove(folder)

    def remove(self) -> None:
        """Remove all rank files of this checkpoint, and `.commfree` if it is then empty."""
        self._remove(self._root)
        self._remove_if_empty(os.path.dirname(self._root))

    def discard(self, token: str) -> None:
        """Remove the rank files of a save that has failed, and folders that are then empty.

        Several ranks may safely do this at the same time.
        """
        self._remove(f"{self._root}/{token}")
        self._remove_if_empty(self._root)
        self._remove_if_empty(os.path.dirname(self._root))

    def _remove_if_empty(self, folder: str) -> None:
        with suppress(OSError):  # it contains files of another save or checkpoint
            self._fs.rmdir(folder)

    def _remove(self, folder: str) -> None:
        """Remove a folder, and ignore errors."""
        # another rank may remove it first, and each file system reports that differently; leftover
        # files are harmless
        with suppress(OSError):
            self._fs.rm(folder, recursive=True)


def file_of_rank(path: FilePath, folder: str, rank: int) -> str:
    """Return the path of a rank's file, given a checkpoint's path and the folder recorded in it."""
    return f"{_sibling_path(str(path), folder)}/rank_{rank}.pt"


def _sibling_path(path: str, name: str) -> str:
    """Return the path of `name` in the folder that contains `path`."""
    return f"{os.path.dirname(path) or '.'}/{name}"


def _rejected(file: str, why: str) -> RuntimeError:
    """Return the exception to raise if a rank file cannot be used."""
    return RuntimeError(
        f"The rank file {file!r} cannot be used: {why}. Nothing was loaded. Restore the files as"
        " they were saved, or resume from another checkpoint."
    )


def plain_or_none(state: Any) -> Any:
    """Return `state` if it consists of plain values and tensors, else None.

    Rank files can contain only such states, because they are loaded without unpickling arbitrary
    objects.
    """
    return state if _is_plain(state) else None


def _is_plain(state: Any) -> bool:
    """Return whether a state consists of plain values, containers and tensors."""
    if type(state) in (dict, Counter, OrderedDict):
        return all(map(_is_plain, (*state.keys(), *state.values())))
    if type(state) in (list, tuple, set, torch.Size):
        return all(map(_is_plain, state))
    return state is None or type(state) in (bool, int, float, complex, str, bytes, torch.Tensor)
