"""Checkpoints that are folders: the ranks of a replica write their shards of a large model.

A file takes as long as one rank needs to gather and write it. FSDP's shards can be written where
they are, by `torch.distributed.checkpoint`, by all ranks of the first replica at once:

    last.ckpt/checkpoint.pt    the checkpoint, with names in place of sharded tensors
    last.ckpt/.metadata        where the shards of each tensor are, by its name
    last.ckpt/__1_0.distcp     the shards of rank 1

The folder is written under a hidden name and renamed when it is complete. An older one is moved
aside first, so between two renames there is none of that name.

This makes one file of it, on a machine whose memory holds the whole model:

    python -m lightning_commfree.resume.folders last.ckpt one.ckpt

In the directory of the folder that file resumes as exactly as the folder does. torch's
`dcp_to_torch_save` is no help: it turns the numbers of an optimizer's parameters into a list.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import gather_texts
from lightning_commfree.model.shards import map_nested
from lightning_commfree.resume.files import (
    FilePath,
    check_records,
    damaged,
    local_path,
    read_whole,
    sync_folder,
    write_whole,
)

REST, _METADATA = "checkpoint.pt", ".metadata"
NAME = "in the folder"  # the key of a dictionary that stands for a sharded tensor
TOKEN = "lightning_commfree.token"  # of the save, in every file of it
# types that the metadata may consist of: these modules' own, whose constructors do nothing
_DCP = "torch.distributed.checkpoint"
_MODULES = (f"{_DCP}.metadata", f"{_DCP}.filesystem", "torch")
_ALSO = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}


def is_folder(path: Path) -> bool:
    """Return whether a checkpoint that is a folder is at this path."""
    return (path / REST).is_file() and (path / _METADATA).is_file()


# -- writing


def write_folder(checkpoint: Any, path: FilePath, channel: Channel) -> None:
    """Write a checkpoint, with `DTensor`s in it; collective over the first replica.

    Args:
        checkpoint: of this rank. The first rank's counts, but for the shards.
        path: of the folder; anything that is there is replaced.
        channel: to the ranks of the replica.

    Raises:
        RuntimeError: it cannot be written; the checkpoint that was there before is unchanged.
    """
    target = local_path(path)
    if target is None:
        raise RuntimeError(
            f"The checkpoint {str(path)!r} cannot be a folder: `folder_above_bytes` needs a disk,"
            " which all ranks of a replica share. Save to a disk, or set `folder_above_bytes=None`."
        )
    shards: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # by id: a tied weight is one object

    def named(value: Any, name: str) -> Any:
        if not isinstance(value, DTensor):
            return value
        name = names.setdefault(id(value), name)
        shards[name] = value.detach()
        return {NAME: name}

    rest = map_nested(checkpoint, named)
    half, before = _hidden(target, "writing"), _hidden(target, "before")
    first = channel.rank == 0
    problem = _made_empty(half) if first else ""
    said = gather_texts(channel, json.dumps((time.time_ns(), problem)))[0]
    token, problem = json.loads(said)
    if problem:
        raise _not_written(target, problem)
    rest[TOKEN] = token, channel.size
    shards[f"{TOKEN}.{channel.rank}"] = torch.tensor([token, channel.rank])
    try:
        save(shards, storage_writer=FileSystemWriter(half), process_group=channel.group)
    except CheckpointException as error:  # not an `Exception`; the same on all ranks
        failures = [f"{one} (rank {rank})" for rank, (one, _) in error.failures.items()]
        raise _not_written(target, "; ".join(failures)) from error
    if not first:
        return
    try:
        _check_complete(half)
        write_whole(rest, half / REST)
        _remove(before)
        if target.exists():
            os.replace(target, before)
        os.replace(half, target)
        sync_folder(target.parent)
        _remove(before)
    except OSError as error:
        raise _not_written(target, error) from error


def _made_empty(folder: Path) -> str:
    """Make a folder, in place of one that a killed save left; return why it cannot be made."""
    try:
        _remove(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return ""


def _check_complete(folder: Path) -> None:
    files = {where.relative_path for where in read_metadata(folder).storage_data.values()}
    missing = sorted(file for file in files if not (folder / file).exists())
    if missing:
        raise OSError(
            f"{', '.join(missing)} of other ranks are not there: the ranks of a replica must"
            " share the disk"
        )


def _hidden(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}")


def _not_written(folder: FilePath, why: object) -> RuntimeError:
    return RuntimeError(
        f"The checkpoint {str(folder)!r} cannot be written: {why}. Make room, or give"
        " `ModelCheckpoint(dirpath=...)`, or the Trainer's `default_root_dir`, another folder."
    )


def _remove(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


# -- reading


@dataclass(frozen=True)
class FolderTensor:
    """A tensor in a folder, read when it is used: all of it, or this rank's shard."""

    reader: FileSystemReader
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, like: Tensor | None = None) -> Tensor:
        """Return the tensor, or the shard that `like` is of it."""
        if isinstance(like, DTensor) and like.shape == self.shape:
            values: Tensor = torch.empty_like(like.detach(), dtype=self.dtype)
        else:
            values = torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            load({self.name: values}, storage_reader=self.reader, no_dist=True)
        return values


def with_values(state: Any) -> Any:
    """Return nested containers with full tensors in place of `FolderTensor`s."""
    return map_nested(state, lambda one, _: one.read() if isinstance(one, FolderTensor) else one)


def read_folder(folder: Path, weights_only: bool = True, lazy: bool = False) -> Any:
    """Return a checkpoint; not collective.

    Args:
        folder: of the checkpoint.
        weights_only: whether no code may be run from it.
        lazy: return `FolderTensor`s for sharded tensors, which are read when they are used.

    Raises:
        RuntimeError: it is damaged, or holds objects that only unpickling loads.
    """
    rest = read_whole(folder / REST, weights_only)
    try:
        reader = _Reader(folder)
        metadata = reader.read_metadata()
    except Exception as error:  # a damaged pickle raises anything
        raise damaged(folder / _METADATA, error) from error
    for where in metadata.storage_data.values():
        _check_shard(folder / where.relative_path, where.offset, where.length)
    token, ranks = rest.pop(TOKEN, (0, 1))
    for rank in range(ranks):
        _check_token(folder, reader, token, rank)

    def in_folder(value: Any, _: str) -> Any:
        if not isinstance(value, dict) or value.keys() != {NAME}:
            return value
        stored = metadata.state_dict_metadata[value[NAME]]
        assert isinstance(stored, TensorStorageMetadata), "`write_folder` writes tensors"
        return FolderTensor(reader, value[NAME], stored.size, stored.properties.dtype)

    try:
        saved = map_nested(rest, in_folder)
    except KeyError as error:  # another save's
        raise damaged(folder / _METADATA, error) from error
    return saved if lazy else with_values(saved)


def _check_shard(path: Path, offset: int, length: int) -> None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            check_records(BytesIO(file.read(length)))
    except Exception as error:
        raise damaged(path, error) from error


def _check_token(folder: Path, reader: _Reader, token: int, rank: int) -> None:
    """Check that a rank's shards are of this save, and its own."""
    tensor = FolderTensor(reader, f"{TOKEN}.{rank}", torch.Size([2]), torch.int64)
    try:
        if tensor.read().tolist() != [token, rank]:
            raise ValueError(f"it is another save's or another rank's than `{REST}` says")
    except Exception as error:
        raise damaged(folder / f"__{rank}_0.distcp", error) from error


class _Reader(FileSystemReader):
    """Reads a folder's metadata once, and runs no code from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._found = read_metadata(folder)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._found


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _ALSO:
            return super().find_class(module_name, global_name)
        if module_name in _MODULES and "." not in global_name:
            found = super().find_class(module_name, global_name)
            is_own_type = isinstance(found, type) and found.__module__ == module_name
            if is_own_type or isinstance(found, torch.dtype):
                return found
        raise pickle.UnpicklingError(f"`{module_name}.{global_name}` does not belong there")


def read_metadata(folder: Path) -> Metadata:
    """Return where the shards of tensors are; no code is run from the file."""
    with (folder / _METADATA).open("rb") as file:
        metadata: Metadata = _Unpickler(file).load()
    return metadata


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one file of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_commfree.resume.folders",
        description="Make one file of a checkpoint that is a folder.",
    )
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("file", type=Path, help="to be written; an existing one is replaced")
    parser.add_argument(
        "--trust", action="store_true", help="read more than plain values, which may run code"
    )
    options = parser.parse_args(arguments)
    if not is_folder(options.folder):
        parser.error(
            f"{str(options.folder)!r} is no such folder: it must have `{REST}` and `{_METADATA}`."
        )
    if options.file.is_dir():
        parser.error(f"{str(options.file)!r} is a folder. Name a file.")
    try:
        write_whole(read_folder(options.folder, not options.trust), options.file)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(
        f"Wrote {str(options.file)!r}. Beside the folder it resumes as exactly as the folder does;"
        " elsewhere without the state of single ranks."
    )


if __name__ == "__main__":
    main()
