"""A checkpoint that is a folder: every rank of a replica writes the parts that it holds.

One file of a large model takes as long as one rank needs to write it. FSDP's tensors can go to the
disk where they are, by `torch.distributed.checkpoint`, all ranks at once and nothing put together:

    last.ckpt/checkpoint.pt    the checkpoint, with names in place of tensors that are divided
    last.ckpt/.metadata        where the parts of a tensor lie, by its name
    last.ckpt/__1_0.distcp     the parts of rank 1

The folder is written under a hidden name and renamed when all of it is on the disk. One that was
there before moves aside first, so for the moment between two renames there is none of that name.

To make one file of it, tensor by tensor, on any machine:

    python -m lightning_commfree.resume.folders last.ckpt one.ckpt

Beside the folder such a file resumes as exactly as the folder does.

Writes a checkpoint that is a folder; see `folder`.

Makes one file of a checkpoint that is a folder.

`python -m lightning_commfree.resume.folders last.ckpt one.ckpt`
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import gather_texts
from lightning_commfree.model.shards import Divided, Wholes, has_stand_ins, mapped, stand_in
from lightning_commfree.resume.files import (
    FilePath,
    check_records,
    damaged,
    read_whole,
    sync_folder,
    write_whole,
)

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


class IntoFolder(Wholes):
    """Keeps what this rank holds of tensors, for a folder that is written in the body of `writing`.

    Args:
        keep: this rank writes the rest; the first one of the channel.
        channel: to the ranks that hold the parts.
    """

    def __init__(self, keep: bool, channel: Channel) -> None:
        super().__init__(keep)
        self._channel = channel
        self._made: list[tuple[Tensor, Tensor]] = []  # stand-ins, and parts
        self._told = False

    @override
    def __call__(self, divided: Divided) -> Tensor:
        assert divided.part is not None, "such tensors go into one file"
        standing = stand_in(divided.shape, divided.dtype, divided.gather)
        self._made.append((standing, divided.part))
        return standing

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        """In the body the first rank calls `write`; the others have written when theirs begins."""
        if not self.keep and (order := self._tell("")):
            self._write_parts(*json.loads(order))
        try:
            yield
        finally:
            if self.keep and not self._told:  # an error came first
                self._tell("")

    def write(self, checkpoint: Any, folder: Path) -> None:
        """Write a checkpoint, on the first rank.

        Args:
            checkpoint: has stand-ins, perhaps not all.
            folder: whatever is there is replaced.

        Raises:
            RuntimeError: it cannot be written; what was there before is as it was.
        """
        numbers = {id(standing): number for number, (standing, _) in enumerate(self._made)}
        names: dict[int, str] = {}

        def named(value: Any, name: str) -> Any:
            number = numbers.get(id(value))
            return value if number is None else {NAME: names.setdefault(number, name)}

        rest = mapped(checkpoint, named)
        if has_stand_ins(rest):
            raise RuntimeError(
                "A hook has put a tensor of a divided model into a container that is no plain"
                " dictionary, list or tuple. `on_save_checkpoint` may keep, rename or remove them."
            )
        half, before = _hidden(folder, "writing"), _hidden(folder, "before")
        token = time.time_ns()
        rest[TOKEN] = token, self._channel.size
        order = str(folder), token, list(names), list(names.values())
        try:
            _remove(half)
            half.mkdir(parents=True)
            self._tell(json.dumps(order))
            self._write_parts(*order)
            self._see_that_it_is_shared(half)
            write_whole(rest, half / REST)

            _remove(before)
            if folder.exists():
                os.replace(folder, before)
            os.replace(half, folder)
            sync_folder(folder.parent)
            _remove(before)
        except OSError as error:
            raise _not_written(folder, error) from error

    def _tell(self, order: str) -> str:
        """Return what the first rank says; collective."""
        self._told = True
        return gather_texts(self._channel, order)[0]

    def _write_parts(
        self, folder: str, token: int, numbers: Sequence[int], names: Sequence[str]
    ) -> None:
        parts = {name: self._made[number][1] for number, name in zip(numbers, names, strict=True)}
        rank = self._channel.rank
        parts[f"{TOKEN}.{rank}"] = torch.tensor([token, rank])
        writer = FileSystemWriter(_hidden(Path(folder), "writing"))
        try:
            save(parts, storage_writer=writer, process_group=self._channel.group)
        except CheckpointException as error:  # no `Exception`; the same on all ranks
            failures = [f"{one} (rank {rank})" for rank, (one, _) in error.failures.items()]
            raise _not_written(folder, "; ".join(failures)) from error

    def _see_that_it_is_shared(self, folder: Path) -> None:
        files = {where.relative_path for where in metadata_of(folder).storage_data.values()}
        missing = sorted(file for file in files if not (folder / file).exists())
        if missing:
            raise OSError(
                f"{', '.join(missing)} of other ranks are not there: the ranks of a replica must"
                " have one disk for it"
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


def main() -> None:
    """Make one file of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_commfree.resume.folders",
        description="Makes one file of a checkpoint that is a folder, tensor by tensor.",
    )
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("file", type=Path, help="to be written; one that is there is replaced")
    parser.add_argument(
        "--trust", action="store_true", help="read more than plain values, which may run code"
    )
    options = parser.parse_args()
    if not is_folder(options.folder):
        parser.error(
            f"{str(options.folder)!r} is no such folder: it must have `{REST}` and `.metadata`."
        )
    if options.file.is_dir():
        parser.error(f"{str(options.file)!r} is a folder. Name a file.")
    try:
        write_whole(read_folder(options.folder, not options.trust), options.file)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(
        f"Wrote {str(options.file)!r}. Beside the folder it resumes as exactly as the folder does;"
        " elsewhere without what only single ranks know."
    )


if __name__ == "__main__":
    main()
