"""Rank files: what only one rank has, in a file per rank beside the checkpoint.

Replicas have weights, optimizers, random numbers and data positions of their own. A Lightning
checkpoint has room for one of each, and gathering all of them on rank 0 would send more than the
training does. So rank 0's own state is in the checkpoint, and every other rank writes a file:

    checkpoints/last.ckpt                                   a Lightning checkpoint, with rank 0's
    checkpoints/.commfree/last.ckpt/120-5f3a.../rank_3.pt   rank 3's, of the save at step 120

The folder is beside the checkpoints, so that it is copied and moved with their folder, and it can
be written wherever they can. It is hidden: `ls`, `glob("*")` and `cp folder/*` skip it,
`os.listdir` does not. A job of one rank has none.

Whatever dies during a save, a checkpoint matches its rank files: those of the new save are complete
before the checkpoint is replaced, and those of the previous save are removed after that. Ranks
without a common disk write and read their own file on their own machine.

Every file says its rank, the number of ranks and the token of its save; files that were swapped,
copied to another rank or left by another save are refused by name.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch import Tensor

from lightning_commfree.model.shards import map_nested, own
from lightning_commfree.resume.files import FilePath, read_whole, write_whole

FOLDER = ".commfree"


class Owner(NamedTuple):
    """The rank whose state a file holds, and the save that wrote it."""

    rank: int
    ranks: int
    token: str

    def __str__(self) -> str:
        return f"the state of rank {self.rank} of {self.ranks} in save {self.token!r}"


class RankFiles:
    """The rank files of one checkpoint, a folder for each save to its path.

    Args:
        checkpoint_path: of the `.ckpt`; local, or anything that fsspec opens.
    """

    def __init__(self, checkpoint_path: FilePath) -> None:
        self._path = str(checkpoint_path)
        self._fs, _ = url_to_fs(self._path)
        self._name = f"{FOLDER}/{os.path.basename(self._path)}"
        self._root = _beside(self._path, self._name)

    def folder(self, token: str) -> str:
        """Return where the files of a save are, relative to the checkpoint's folder."""
        return f"{self._name}/{token}"

    def write(self, owner: Owner, state: dict[str, Any]) -> None:
        """Write the state of a rank; of a sharded tensor its own shard.

        Raises:
            RuntimeError: the file cannot be written.
        """
        file = f"{self._root}/{owner.token}/rank_{owner.rank}.pt"
        try:
            write_whole({**owner._asdict(), "state": local_tensors(state)}, file)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"Rank {owner.rank} cannot write its part of a checkpoint to {file!r}: {error}"
                " Every rank writes beside the checkpoint, on its machine's own disk where none is"
                " shared. The folder must be one that can be written by that path on every machine."
            ) from error

    def read(self, owner: Owner, folder: str, weights_only: bool = True) -> Any:
        """Return the state that a rank wrote, None if its file is missing.

        Args:
            owner: the rank and the save that are wanted.
            folder: named by the checkpoint, relative to its own folder.
            weights_only: whether no code may be run from the file.

        Raises:
            RuntimeError: the file is another rank's, of another save, or damaged.
        """
        file = self._find(folder, owner.rank)
        if file is None:
            return None
        saved = read_whole(file, weights_only)
        if not isinstance(saved, dict) or not {*Owner._fields, "state"} <= saved.keys():
            raise _refused(file, "it holds no rank's state")
        found = Owner(*(saved[field] for field in Owner._fields))
        if found != owner:
            raise _refused(file, f"it is {found}, and {owner} is needed")
        return saved["state"]

    def remove_older(self, token: str, keep: int = 0) -> None:
        """Remove the files of saves before `token`, but for the `keep` latest of them.

        Other ranks may do so at the same time.
        """
        with suppress(OSError):  # no earlier save, or another rank was quicker
            folders = [str(folder).rstrip("/") for folder in self._fs.ls(self._root, detail=False)]
            earlier = [folder for folder in folders if os.path.basename(folder) != token]
            earlier.sort(key=lambda folder: folder.rpartition("-")[2])  # the time, in hexadecimals
            for folder in earlier[: len(earlier) - keep]:
                self._remove(folder)

    def remove(self) -> None:
        """Remove all rank files of this checkpoint, and the common folder if it is empty then."""
        self._remove(self._root)
        with suppress(OSError):  # not empty: it has files of another checkpoint
            self._fs.rmdir(os.path.dirname(self._root))

    def _find(self, folder: str, rank: int) -> str | None:
        parts = PurePosixPath(folder).parts
        if len(parts) != 3 or parts[0] != FOLDER or ".." in parts:
            raise RuntimeError(
                f"The checkpoint {self._path!r} names {folder!r} as the folder of its rank files."
                f" They are below '{FOLDER}/' beside it and nowhere else, so the checkpoint was"
                " changed after it was saved. Nothing was loaded; resume from another checkpoint."
            )
        # a link to a checkpoint finds the files beside the checkpoint that it points to
        for path in dict.fromkeys((self._path, os.path.realpath(self._path))):
            file = f"{_beside(path, folder)}/rank_{rank}.pt"
            if self._fs.exists(file):
                return file
        return None

    def _remove(self, folder: str) -> None:
        # another rank on this disk may be quicker, which every file system reports in its own way;
        # files that stay do no harm
        with suppress(OSError):
            self._fs.rm(folder, recursive=True)


def _beside(path: str, name: str) -> str:
    return f"{os.path.dirname(path) or '.'}/{name}"


def _refused(file: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"The file {file!r} is refused: {why}. Nothing was loaded. Put the files back as they were"
        " saved, or resume from another checkpoint."
    )


def local_tensors(state: Any) -> Any:
    """Return nested containers with this rank's own memory in place of each tensor."""
    return map_nested(state, lambda value, _: own(value) if isinstance(value, Tensor) else value)


def copied(state: Any, only: Sequence[Tensor] | None = None) -> Any:
    """Return nested containers with copies of their tensors in host memory.

    Args:
        state: tensors and other values.
        only: copy tensors that share memory with one of these, and keep the others; None: copy all.
    """
    shared = None if only is None else {one.untyped_storage().data_ptr() for one in only}
    copies: dict[Any, Tensor] = {}  # a tensor that is in a state twice is copied, and written, once

    def copy(value: Any, _: str) -> Any:
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            return value
        local = own(value)
        if shared is not None and local.untyped_storage().data_ptr() not in shared:
            return value
        key: Any = id(value)
        if local.numel():  # memory that a state holds under two objects is copied once too
            key = local.data_ptr(), local.dtype, local.shape, local.stride()
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    return map_nested(state, copy)


def plain(state: Any) -> Any:
    """Return a state of plain values and tensors, None for one that holds anything else.

    A rank file is read without running code from it, so only such states can be in one.
    """
    return state if _is_plain(state) else None


def _is_plain(state: Any) -> bool:
    if type(state) in (dict, Counter, OrderedDict):
        return all(map(_is_plain, (*state.keys(), *state.values())))
    if type(state) in (list, tuple, set, torch.Size):
        return all(map(_is_plain, state))
    return state is None or type(state) in (bool, int, float, complex, str, bytes, torch.Tensor)
