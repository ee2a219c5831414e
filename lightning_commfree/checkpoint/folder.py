"""A checkpoint that is a folder: every rank of a replica writes the parts that it holds.

One file of a large model takes as long as one rank needs to write it. FSDP's tensors can go to the
disk where they are, by `torch.distributed.checkpoint`, all ranks at once and nothing put together:

    last.ckpt/checkpoint.pt    the checkpoint, with names in place of tensors that are divided
    last.ckpt/.metadata        where the parts of a tensor lie, by its name
    last.ckpt/__1_0.distcp     the parts of rank 1

The folder is written under a hidden name and renamed when all of it is on the disk. One that was
there before moves aside first, so for the moment between two renames there is none of that name.

To make one file of it, tensor by tensor, on any machine:

    python -m lightning_commfree.checkpoint.one_file last.ckpt one.ckpt

Beside the folder such a file resumes as exactly as the folder does.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from lightning_commfree.checkpoint.whole_files import check_records, damaged, read_whole
from lightning_commfree.comm.wholes import mapped, stand_in

REST, _METADATA = "checkpoint.pt", ".metadata"
NAME = "in the folder"  # the key of a dictionary that stands for a divided tensor
TOKEN = "lightning_commfree.token"  # of the save, in all that it has written
# what the metadata is made of: of modules their own types, which do nothing when they are made
_DCP = "torch.distributed.checkpoint"
_MODULES = (f"{_DCP}.metadata", f"{_DCP}.filesystem", "torch")
_ALSO = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}


def is_folder(path: Path) -> bool:
    """Return whether such a checkpoint is there."""
    return (path / REST).is_file() and (path / _METADATA).is_file()


def read_folder(folder: Path, weights_only: bool = True) -> Any:
    """Return a checkpoint, with stand-ins for tensors that are divided; no rank waits for another.

    Args:
        folder: of the checkpoint.
        weights_only: whether no code may be run from it.

    Raises:
        RuntimeError: it is damaged, or holds what only unpickling loads.
    """
    rest = read_whole(folder / REST, weights_only)
    try:
        reader = _Reader(folder)
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever a damaged pickle makes of it
        raise damaged(folder / _METADATA, error) from error
    _check_parts(folder, reader.read_metadata())
    token, ranks = rest.pop(TOKEN, (0, 1))
    for rank in range(ranks):
        _check_token(folder, reader, token, rank)

    def standing(value: Any, _: str) -> Any:
        if not isinstance(value, dict) or value.keys() != {NAME}:
            return value
        name = value[NAME]
        tensor = stored[name]
        if not isinstance(tensor, TensorStorageMetadata):
            raise KeyError(name)
        shape, dtype = tensor.size, tensor.properties.dtype
        return stand_in(
            shape, dtype, partial(_whole, reader, name, shape, dtype), partial(_fill, reader, name)
        )

    try:
        return mapped(rest, standing)
    except KeyError as error:  # another save's
        raise damaged(folder / _METADATA, error) from error


def _check_parts(folder: Path, metadata: Metadata) -> None:
    for where in metadata.storage_data.values():
        path = folder / where.relative_path
        try:
            with path.open("rb") as file:
                file.seek(where.offset)
                check_records(BytesIO(file.read(where.length)))
        except Exception as error:
            raise damaged(path, error) from error


def _check_token(folder: Path, reader: _Reader, token: int, rank: int) -> None:
    """See that a rank's parts are those of this save, and its own."""
    name = f"{TOKEN}.{rank}"
    try:
        found = _whole(reader, name, (2,), torch.int64).tolist()
        if found != [token, rank]:
            raise ValueError(f"it is another save's or another rank's than `{REST}` says")
    except Exception as error:
        raise damaged(folder / f"__{rank}_0.distcp", error) from error


class _Reader(FileSystemReader):
    """Reads a folder's metadata once, and runs no code from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._found = metadata_of(folder)

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


def metadata_of(folder: Path) -> Metadata:
    """Return what says where the parts of tensors lie; no code is run from it."""
    with (folder / _METADATA).open("rb") as file:
        metadata: Metadata = _Unpickler(file).load()
    return metadata


def _whole(reader: _Reader, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    values = torch.empty(tuple(shape), dtype=dtype)
    _fill(reader, name, values)
    return values


def _fill(reader: _Reader, name: str, tensor: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
        load({name: tensor}, storage_reader=reader, no_dist=True)
