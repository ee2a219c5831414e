"""Checkpoint folders: each rank of a replica writes its shards of a large model.

A checkpoint file is gathered and written by a single rank. With FSDP, all ranks of the first
replica can instead write their shards in parallel, with `torch.distributed.checkpoint`:

    last.ckpt/checkpoint.pt               the checkpoint, with names in place of sharded tensors
    last.ckpt/1763..64/.metadata          which files contain the shards of each tensor
    last.ckpt/1763..64/__1_0.distcp       rank 1's shards

`checkpoint.pt` contains the name of the subfolder with its shards, so replacing this single file
replaces the checkpoint:

1. Everything is written into a hidden folder beside the checkpoint. If no checkpoint with this name
   exists, the hidden folder is renamed, which completes the save.
2. Otherwise, the new subfolder is moved into the existing folder.
3. The old `checkpoint.pt` is replaced with the new one.
4. Subfolders from earlier saves are removed.

If the process is killed at any point, either the old or the new checkpoint is intact, on any file
system. (Exchanging two folders atomically is impossible on NFS.)

`checkpoint.pt` also contains a checksum of `.metadata`; all other files contain their own checksums
(see `resume.files`).

To convert a folder to a single file, on a machine with enough memory for the full model:

    python -m lightning_commfree.resume.folders last.ckpt one.ckpt

If `one.ckpt` is in the same directory as `last.ckpt`, a fit can resume exactly from it. torch's
`dcp_to_torch_save` cannot be used, because it turns the parameter indices in an optimizer's state
into a list.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
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
    damaged,
    local_path,
    read_verified,
    sync_folder,
    verify_records,
    write_atomic,
)

REST, _METADATA = "checkpoint.pt", ".metadata"
NAME = "in the folder"  # {NAME: name} replaces a sharded tensor in checkpoint.pt
# Key of the token, a number that is unique to a save and that all of its files contain.
# checkpoint.pt stores it together with the number of ranks that wrote shards and the checksum of
# the metadata.
TOKEN = "lightning_commfree.token"
# the only types that unpickling the metadata may construct; their constructors are harmless
_DCP = "torch.distributed.checkpoint"
_MODULES = (f"{_DCP}.metadata", f"{_DCP}.filesystem", "torch")
_ALSO = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}


def is_folder(path: Path) -> bool:
    """Return whether `path` is a checkpoint folder, which contains `checkpoint.pt`."""
    return (path / REST).is_file()


# -- writing


def write_folder(checkpoint: Any, path: FilePath, channel: Channel) -> None:
    """Write a checkpoint that contains `DTensor`s; collective over the first replica.

    All ranks write their shards, and the first rank writes the rest of `checkpoint`. Anything at
    `path` is replaced. Raise a RuntimeError if the checkpoint cannot be written; an existing one is
    then unchanged.
    """
    target = local_path(path)
    if target is None:
        raise RuntimeError(
            f"The checkpoint {str(path)!r} cannot be saved as a folder: `folder_above_bytes` needs"
            " a file system that is mounted on this machine and shared by all ranks of a replica."
            " Save to such a file system, or set `folder_above_bytes=None`."
        )
    shards: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # by id: a tied weight is written once

    def move_to_shards(value: Any, name: str) -> Any:
        """Put a `DTensor` into `shards`, and return a reference to it; return other values."""
        if not isinstance(value, DTensor):
            return value
        name = names.setdefault(id(value), name)
        shards[name] = value.detach()
        return {NAME: name}

    rest = map_nested(checkpoint, move_to_shards)
    staging, first = target.with_name(f".{target.name}.writing"), channel.rank == 0
    problem = _make_empty(staging) if first else ""
    from_first = gather_texts(channel, json.dumps((time.time_ns(), problem)))[0]
    token, problem = json.loads(from_first)
    if problem:
        raise _not_written(target, problem)
    written = staging / str(token)
    shards[f"{TOKEN}.{channel.rank}"] = torch.tensor([token, channel.rank])
    try:
        save(shards, storage_writer=FileSystemWriter(written), process_group=channel.group)
    except CheckpointException as error:  # a `BaseException`; raised on all ranks
        failures = [f"{one} (rank {rank})" for rank, (one, _) in error.failures.items()]
        if first:
            _remove_unfinished(staging)
        raise _not_written(target, "; ".join(failures)) from error
    if not first:
        return
    try:
        _check_complete(written)
        rest[TOKEN] = token, channel.size, _checksum(written)
        write_atomic(rest, staging / REST)
        _replace(target, staging, written.name)
    except RuntimeError:  # `write_atomic` has explained it
        _remove_unfinished(staging)
        raise
    except OSError as error:
        _remove_unfinished(staging)
        raise _not_written(target, error) from error


def _remove_unfinished(folder: Path) -> None:
    """Remove a folder; ignore errors."""
    with suppress(OSError):  # the error of the save is more important
        _remove(folder)


def _make_empty(folder: Path) -> str:
    """Create an empty folder in place of what a killed save left behind; return an error or ""."""
    try:
        _remove(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return ""


def _replace(target: Path, staging: Path, token: str) -> None:
    """Replace the checkpoint `target` with the complete folder `staging`.

    The module docstring describes the steps. `token` is the name of the subfolder that contains the
    new checkpoint's shards.
    """
    if target.is_symlink() or not target.is_dir():
        target.unlink(missing_ok=True)
        os.replace(staging, target)
        sync_folder(target.parent)
        return
    os.replace(staging / token, target / token)
    sync_folder(target)  # before `checkpoint.pt` names it
    os.replace(staging / REST, target / REST)
    sync_folder(target)
    for entry in {*target.iterdir()} - {target / token, target / REST}:
        _remove(entry)
    _remove(staging)


def _checksum(folder: Path) -> str:
    """Return the checksum of a folder's `.metadata`."""
    return hashlib.sha256((folder / _METADATA).read_bytes()).hexdigest()


def _check_complete(folder: Path) -> None:
    """Raise an `OSError` if a file that a folder's `.metadata` lists does not exist."""
    files = {where.relative_path for where in read_metadata(folder).storage_data.values()}
    missing = sorted(file for file in files if not (folder / file).exists())
    if missing:
        raise OSError(
            f"files of other ranks are missing ({', '.join(missing)}): all ranks of a replica must"
            " write to a shared disk"
        )


def _not_written(folder: FilePath, why: object) -> RuntimeError:
    """Return the exception to raise if a checkpoint folder cannot be written."""
    return RuntimeError(
        f"The checkpoint {str(folder)!r} cannot be written: {why}. Free up disk space, or set"
        " another folder in `ModelCheckpoint(dirpath=...)` or the Trainer's `default_root_dir`."
    )


def _remove(folder: Path) -> None:
    """Remove a file, link or folder, if it exists."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


# -- reading


@dataclass(frozen=True)
class FolderTensor:
    """A tensor in a checkpoint folder that is read lazily: in full, or only this rank's shard."""

    reader: FileSystemReader
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, like: Tensor | None = None) -> Tensor:
        """Read the full tensor, or this rank's shard if `like` is a `DTensor` of the same shape."""
        if isinstance(like, DTensor) and like.shape == self.shape:
            values: Tensor = torch.empty_like(like.detach(), dtype=self.dtype)
        else:
            values = torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            # `no_dist` is intended: each rank reads only the shards that it needs
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                load({self.name: values}, storage_reader=self.reader, no_dist=True)
            except CheckpointException as error:  # a `BaseException`
                [(why, _)] = error.failures.values()
                raise damaged(Path(self.reader.path) / "*.distcp", why) from error
        return values


def read_folder_tensors(state: Any) -> Any:
    """Return a copy of nested containers, with each `FolderTensor` read in full."""
    return map_nested(state, lambda one, _: one.read() if isinstance(one, FolderTensor) else one)


def read_folder(folder: Path, weights_only: bool = True, lazy: bool = False) -> Any:
    """Read a checkpoint folder, without communication between ranks.

    With `weights_only`, reject objects that could run code when loaded. With `lazy`, return a
    `FolderTensor`, to be read later, in place of each sharded tensor. Raise a RuntimeError if the
    checkpoint is damaged, or contains objects that `weights_only` rejects.
    """
    rest = read_verified(folder / REST, weights_only)
    try:
        token, ranks, checksum = rest.pop(TOKEN)
    except (KeyError, ValueError) as error:
        raise damaged(folder / REST, ValueError("it is not from a checkpoint folder")) from error
    shards = folder / str(token)
    try:
        if _checksum(shards) != checksum:
            raise ValueError("it is corrupted, or from a different save")
        reader = _Reader(shards)
        metadata = reader.read_metadata()
    except Exception as error:  # including objects that the unpickler rejects
        raise damaged(shards / _METADATA, error) from error
    for where in metadata.storage_data.values():
        _check_shard(shards / where.relative_path, where.offset, where.length)
    for rank in range(ranks):
        _check_token(shards, reader, token, rank)

    def to_folder_tensor(value: Any, _: str) -> Any:
        """Return a `FolderTensor` for a reference that `write_folder` has written."""
        if not isinstance(value, dict) or value.keys() != {NAME}:
            return value
        stored = metadata.state_dict_metadata[value[NAME]]
        assert isinstance(stored, TensorStorageMetadata), "`write_folder` writes tensors"
        return FolderTensor(reader, value[NAME], stored.size, stored.properties.dtype)

    try:
        saved = map_nested(rest, to_folder_tensor)
    except KeyError as error:  # checkpoint.pt and .metadata are from different saves
        raise damaged(folder / _METADATA, error) from error
    return saved if lazy else read_folder_tensors(saved)


def _check_shard(path: Path, offset: int, length: int) -> None:
    """Raise a `RuntimeError` if a part of a shard file is damaged; units are bytes."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            verify_records(BytesIO(file.read(length)))
    except Exception as error:
        raise damaged(path, error) from error


def _check_token(folder: Path, reader: _Reader, token: int, rank: int) -> None:
    """Raise a RuntimeError if a shard file is from another save or rank, or is damaged."""
    tensor = FolderTensor(reader, f"{TOKEN}.{rank}", torch.Size([2]), torch.int64)
    try:
        if tensor.read().tolist() != [token, rank]:
            raise ValueError(f"it belongs to a different save or rank than `{REST}` expects")
    except Exception as error:
        raise damaged(folder / f"__{rank}_0.distcp", error) from error


class _Reader(FileSystemReader):
    """Reader for torch's checkpoint format that never runs code from the metadata.

    It loads the metadata only once.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._found = read_metadata(folder)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was loaded with this reader."""
        return self._found


class _Unpickler(pickle.Unpickler):
    """Unpickler that constructs only the types that a checkpoint's metadata consists of."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return an allowed type; raise an `UnpicklingError` for any other."""
        if (module_name, global_name) in _ALSO:
            return super().find_class(module_name, global_name)
        if module_name in _MODULES and "." not in global_name:
            found = super().find_class(module_name, global_name)
            is_own_type = isinstance(found, type) and found.__module__ == module_name
            if is_own_type or isinstance(found, torch.dtype):
                return found
        raise pickle.UnpicklingError(
            f"the metadata contains `{module_name}.{global_name}`, which is not an allowed type"
        )


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint folder's `.metadata`, without running code from it."""
    with (folder / _METADATA).open("rb") as file:
        metadata: Metadata = _Unpickler(file).load()
    return metadata


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command that converts a checkpoint folder to a single file."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_commfree.resume.folders",
        description="Convert a checkpoint folder to a single file.",
    )
    parser.add_argument("folder", type=Path, help="the checkpoint folder")
    parser.add_argument("file", type=Path, help="the file to write; an existing one is replaced")
    parser.add_argument(
        "--trust", action="store_true", help="load arbitrary objects too, which may run code"
    )
    options = parser.parse_args(arguments)
    if not is_folder(options.folder):
        parser.error(
            f"{str(options.folder)!r} is not a checkpoint folder: it must contain `{REST}` and"
            f" `{_METADATA}`."
        )
    if options.file.is_dir():
        parser.error(f"{str(options.file)!r} is a folder. Pass the path of a file.")
    try:
        write_atomic(read_folder(options.folder, not options.trust), options.file)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(
        f"Wrote {str(options.file)!r}. A fit can resume exactly from this file if it is in the same"
        " directory as the folder; elsewhere, a fit resumes without per-rank state."
    )


if __name__ == "__main__":
    main()
