"""Checkpoint files that are complete or absent: how one is written, and checked when it is read.

A file is written under a hidden name beside its final one, flushed to the disk, and renamed; then
the folder is flushed. A process that is killed, or a full disk, leaves the file that was there
before. (Lightning writes below `$TMPDIR` and moves; where the folder is a mount of its own, the
move is a copy onto the file that was there.) The hidden name is always the same, so the next save
to that name replaces what a killed one has left.

`torch.save` writes a checksum (CRC-32) of every record, and `torch.load` ignores them:
`check_whole` compares them, at about 0.3 s per GB in the page cache.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import fsspec  # type: ignore[import-untyped]
import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

FilePath = str | Path

_WRITING = ".writing"  # ends the hidden name
_FOLDER_BIT = 0x10  # of a record's attributes in a zip archive


def write_whole(state: Any, path: FilePath) -> None:
    """Write a file as `torch.save` does, complete or not at all; folders are made.

    Args:
        state: tensors and other values, which must not change meanwhile.
        path: of the file. On a file system other than a disk, that one's transaction must keep the
            file complete.

    Raises:
        RuntimeError: it cannot be written; the file that was there before is unchanged.
    """
    target = local_path(path)
    if target is None:
        fs, place = url_to_fs(str(path))
        fs.makedirs(os.path.dirname(place), exist_ok=True)
        with fs.transaction, fs.open(place, "wb") as file:
            torch.save(state, file)
        return
    sink = _Sink()
    half = target.with_name(f".{target.name}{_WRITING}")
    try:
        new = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        with half.open("wb") as file:
            sink.write_all(state, file)
        os.replace(half, target)
        for folder in (target.parent, *(folder.parent for folder in new)):
            sync_folder(folder)
    except OSError as error:
        written = half.stat().st_size if half.exists() else 0
        raise RuntimeError(_why_not_written(target, error, sink.needed, written)) from error
    finally:
        with suppress(OSError):
            half.unlink()


class _Sink:
    """A file for `torch.save` that survives a full disk.

    After an error it writes nothing more and keeps counting. torch, which would raise an error of
    its own over a half-written file, ends as usual, and the message can say how much is missing.
    """

    def __init__(self) -> None:
        self.needed = 0  # bytes
        self._write: Callable[[Any], Any] = len
        self._error: OSError | None = None

    def write_all(self, state: Any, file: IO[bytes]) -> None:
        """Write a state to the disk.

        Raises:
            OSError: the first one that came.
        """
        self._write = file.write
        torch.save(state, cast("IO[bytes]", self))  # it calls `write` and `flush`
        if self._error is not None:
            raise self._error
        file.flush()
        os.fsync(file.fileno())

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.needed += size
        if self._error is None:
            try:
                self._write(data)
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Do nothing: the file is flushed at the end."""


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why_not_written(target: Path, error: OSError, needed: int, written: int) -> str:
    missing = ""
    if needed > written:
        missing = (
            f" It has {_megabytes(needed)}, of which {_megabytes(written)} could be written:"
            f" {_megabytes(needed - written)} are missing."
        )
    before = "What was there before is as it was" if target.exists() else "Nothing is there"
    return (
        f"The checkpoint file {str(target)!r} cannot be written: {type(error).__name__}:"
        f" {error}.{missing} {before}. Make room, or give `ModelCheckpoint(dirpath=...)`, or the"
        " Trainer's `default_root_dir`, another folder."
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def read_whole(path: FilePath, weights_only: bool = True) -> Any:
    """Read what `torch.save` wrote, tensors on the CPU.

    Args:
        path: of the file.
        weights_only: whether no code may be run from the file.

    Raises:
        RuntimeError: the file is damaged, or holds objects that only unpickling loads; with its
            name and what to do.
    """
    check_whole(path)
    try:
        with fsspec.open(str(path), "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError) or not _is_archive(path):
            raise damaged(path, error) from error
        raise RuntimeError(
            f"The checkpoint file {str(path)!r} holds more than tensors and plain values, and to"
            " read that may run code from it. If you trust it, pass `weights_only=False` to"
            f" `Trainer.fit`, or `--trust` to the command that makes one file. What was found:"
            f" {error}"
        ) from error


@contextmanager
def reading_whole(path: FilePath) -> Iterator[None]:
    """Check a checkpoint before a plugin reads it in the body, and explain its errors.

    Raises:
        RuntimeError: the file is damaged; with its name and what to do.
    """
    check_whole(path)
    try:
        yield
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        local = local_path(path)
        if local is None or not local.is_file() or "weights_only" in str(error):
            raise
        raise damaged(path, error) from error


def check_whole(path: FilePath) -> None:
    """Compare every record of a file that `torch.save` wrote with its checksum.

    Files of other kinds, and on file systems other than this machine's, are not checked.

    Raises:
        RuntimeError: a record is not as it was written.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return
    try:
        if zipfile.is_zipfile(local):
            check_records(local)
    except Exception as error:  # a damaged directory makes zipfile raise anything
        raise damaged(path, error) from error


def check_records(archive: Path | IO[bytes]) -> None:
    """Compare every record of an archive that `torch.save` wrote with its checksum.

    Raises:
        ValueError: a record is not as it was written. A damaged directory makes zipfile raise
            anything.
    """
    with zipfile.ZipFile(archive) as opened:
        records = opened.infolist()
        # torch reads nothing for a record that is marked as a folder, and does not notice
        bad = next((r.filename for r in records if r.external_attr & _FOLDER_BIT), None)
        if any(record.CRC for record in records):  # else `set_crc32_options(False)` was on
            bad = bad or opened.testzip()
    if bad is not None:
        raise ValueError(f"its record {bad!r} is not as it was written")


def damaged(path: FilePath, error: Exception) -> RuntimeError:
    """Return the error for a checkpoint that cannot be read."""
    return RuntimeError(
        f"The checkpoint file {str(path)!r} cannot be read: {type(error).__name__}: {error}. It was"
        " probably cut short, by a full disk or an interrupted copy, or changed on its disk."
        " Nothing was loaded; resume from an earlier checkpoint."
    )


def local_path(path: FilePath) -> Path | None:
    """Return the path of a file on this machine, None on any other file system."""
    fs, place = url_to_fs(str(path))
    return Path(place) if "file" in fs.protocol else None


def _is_archive(path: FilePath) -> bool:
    """Return whether the file has the end that `torch.save` writes: a cut file does not."""
    with fsspec.open(str(path), "rb") as file:
        try:
            return zipfile.is_zipfile(file)
        except zipfile.BadZipFile:  # it ends in a damaged way
            return False
