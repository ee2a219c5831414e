"""Write checkpoint files atomically, and verify them when they are read.

A file is written under a hidden name in the same folder, flushed to disk and renamed; then the
folder is flushed. If the process is killed or the disk is full, the old file is unchanged.
(Lightning writes to `$TMPDIR` and then moves the file. If `$TMPDIR` is on another file system, the
move overwrites the old file in place.) The hidden name is always the same, so the next save
replaces anything that a killed process left behind.

`torch.save` writes a checksum (CRC-32) for every record, but `torch.load` ignores it. `verify_file`
checks all checksums, which takes about 0.3 s per GB if the file is in the page cache.
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

_WRITING = ".writing"  # suffix of the hidden name
_FOLDER_BIT = 0x10  # in a zip record's attributes; marks a folder


def write_atomic(state: Any, path: FilePath) -> None:
    """Write a file atomically with `torch.save`, and create missing parent folders.

    `state` must not change during the call. On a remote file system, the write is as atomic as
    fsspec's transactions for it. Raise a RuntimeError if the file cannot be written; an existing
    file is then unchanged.
    """
    target = local_path(path)
    if target is None:
        fs, place = url_to_fs(str(path))
        fs.makedirs(os.path.dirname(place), exist_ok=True)
        with fs.transaction, fs.open(place, "wb") as file:
            torch.save(state, file)
        return
    sink = _Sink()
    temporary = target.with_name(f".{target.name}{_WRITING}")
    try:
        new = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            sink.write_all(state, file)
        os.replace(temporary, target)
        # the entries of new folders must survive a power failure, too
        for folder in (target.parent, *(folder.parent for folder in new)):
            sync_folder(folder)
    except OSError as error:
        written = temporary.stat().st_size if temporary.exists() else 0
        raise RuntimeError(_why_not_written(target, error, sink.needed, written)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


class _Sink:
    """File object for `torch.save` that defers write errors, such as a full disk.

    After an error, it stops writing but continues to count bytes. So torch does not raise its own
    error about an incomplete file, and our error message can say how much space is missing.
    """

    def __init__(self) -> None:
        self.needed = 0  # bytes
        self._write: Callable[[Any], Any] = len
        self._error: OSError | None = None

    def write_all(self, state: Any, file: IO[bytes]) -> None:
        """Write `state` to `file` and flush it to disk; raise the first `OSError` at the end."""
        self._write = file.write
        torch.save(state, cast("IO[bytes]", self))  # calls only `write` and `flush`
        if self._error is not None:
            raise self._error
        file.flush()
        os.fsync(file.fileno())

    def write(self, data: Any) -> int:
        """Write bytes or, after an error, only count them; return their number."""
        size = memoryview(data).nbytes
        self.needed += size
        if self._error is None:
            try:
                self._write(data)
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Do nothing: `write_all` flushes the file at the end."""


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # unsupported by some network file systems
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why_not_written(target: Path, error: OSError, needed: int, written: int) -> str:
    """Return the error text for a file of which `written` of `needed` bytes were written."""
    missing = ""
    if needed > written:
        missing = (
            f" It needs {_megabytes(needed)}, but only {_megabytes(written)} could be written"
            f" ({_megabytes(needed - written)} missing)."
        )
    before = "The existing file is unchanged" if target.exists() else "No file was left behind"
    return (
        f"The checkpoint file {str(target)!r} cannot be written: {type(error).__name__}:"
        f" {error}.{missing} {before}. Free up disk space, or set another folder in"
        " `ModelCheckpoint(dirpath=...)` or the Trainer's `default_root_dir`."
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"


def read_verified(path: FilePath, weights_only: bool = True) -> Any:
    """Verify and read a file written by `torch.save`; tensors are loaded on the CPU.

    Raise a RuntimeError if the file is damaged, or contains objects that could run code when loaded
    and that `weights_only` therefore rejects.
    """
    verify_file(path)
    try:
        with fsspec.open(str(path), "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError) or not _is_archive(path):
            raise damaged(path, error) from error
        raise RuntimeError(
            f"The checkpoint file {str(path)!r} contains objects other than tensors and plain"
            " values, and loading them may run code from the file. If you trust it, pass"
            " `weights_only=False` to `Trainer.fit`, or `--trust` to `python -m"
            f" lightning_commfree.resume.folders`. torch reports: {error}"
        ) from error


@contextmanager
def verified_reading(path: FilePath) -> Iterator[None]:
    """Context manager: verify a checkpoint file if it is local, and explain errors of reading it.

    It raises a RuntimeError if the file is damaged.
    """
    verify_file(path)
    try:
        yield
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        local = local_path(path)
        if local is None or not local.is_file() or "weights_only" in str(error):
            raise
        raise damaged(path, error) from error


def verify_file(path: FilePath) -> None:
    """Verify the checksums in a local file written by `torch.save`; do nothing for other files.

    Raise a RuntimeError if the file is damaged.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return
    try:
        if zipfile.is_zipfile(local):
            verify_records(local)
    except Exception as error:  # zipfile raises all kinds of errors for a damaged directory
        raise damaged(path, error) from error


def verify_records(archive: Path | IO[bytes]) -> None:
    """Verify the checksums of all records in a zip archive written by `torch.save`.

    Raise a ValueError if a record is damaged. If the archive's directory is damaged, zipfile may
    raise other errors.
    """
    with zipfile.ZipFile(archive) as opened:
        records = opened.infolist()
        # torch silently reads no data for a record that is marked as a folder
        bad = next((r.filename for r in records if r.external_attr & _FOLDER_BIT), None)
        if any(record.CRC for record in records):  # `set_crc32_options(False)` writes none
            bad = bad or opened.testzip()
    if bad is not None:
        raise ValueError(f"its record {bad!r} is corrupted")


def damaged(path: FilePath, error: BaseException) -> RuntimeError:
    """Return the exception to raise if a checkpoint file is damaged and cannot be read."""
    return RuntimeError(
        f"The checkpoint file {str(path)!r} cannot be read: {type(error).__name__}: {error}. It was"
        " probably truncated by a full disk or an interrupted copy, or corrupted on disk. Nothing"
        " was loaded; resume from an earlier checkpoint."
    )


def local_path(path: FilePath) -> Path | None:
    """Convert a path or URL to a local path; return None if it is on a remote file system."""
    fs, place = url_to_fs(str(path))
    return Path(place) if "file" in fs.protocol else None


def _is_archive(path: FilePath) -> bool:
    """Return whether a file ends with a zip archive's directory; a truncated file does not."""
    with fsspec.open(str(path), "rb") as file:
        try:
            return zipfile.is_zipfile(file)
        except zipfile.BadZipFile:  # damaged at the end
            return False
