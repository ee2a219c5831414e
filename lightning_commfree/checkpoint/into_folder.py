"""Writes a checkpoint that is a folder; see `folder`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_commfree.checkpoint.folder import NAME, REST, TOKEN, metadata_of
from lightning_commfree.checkpoint.whole_files import FilePath, sync_folder, write_whole
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import gather_texts
from lightning_commfree.comm.wholes import Divided, Wholes, has_stand_ins, mapped, stand_in


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
