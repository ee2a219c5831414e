"""Checkpoint files that are whole or not there: how one is written, and checked when it is read.

A file is written under a hidden name beside its final one, brought to the disk, and renamed; then
the folder is brought to the disk. A process that is killed, or a full disk, leaves the file that
was there before. (Lightning writes below `$TMPDIR` and moves, and where the folder is a mount of
its own a move is a copy onto the file that was there.) Tensors go straight into the file, those of
a GPU one at a time. The hidden name is always the same: the next save to that name takes the place
of what a killed one has left.

`torch.save` writes a checksum (CRC-32) of every record, and `torch.load` does not look at them:
`check_whole` does, at about 0.3 s per GB that is in the page cache.

Writes the file that `torch.save` writes, out of tensors that come when their turn is.

`torch.save` wants all tensors of a state in memory. Here some of them may be stand-ins
(`comm.wholes`), which are fetched, written and dropped one after another. `torch.load` reads the
file as any other, with `mmap=True` and `weights_only=True` too: an archive of one pickle, in which
a tensor's values are the number of a record, and of these records, each with its checksum.
"""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import fsspec  # type: ignore[import-untyped]
import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch import Tensor
from typing_extensions import override

from lightning_commfree.model.shards import has_stand_ins, is_stand_in, values_of

_FOLDER = "archive"  # any name does
_PROTOCOL = 2  # of the pickle, as torch has it
_ALIGNED = 64  # bytes: at a multiple of it the values of a record begin, as torch has it
_HEADER, _LONG_SIZES = 30, 20  # bytes in front of them, beside the record's name and the padding
_PADDING_HEAD = 4


def write_archive(state: Any, file: IO[bytes]) -> None:
    """Write a state; stand-ins are fetched one after another.

    Args:
        state: of tensors and other values. `torch.load` puts all tensors on the CPU.
        file: open for writing; `write`, `tell` and `flush` are called.

    Raises:
        RuntimeError: a tensor on `meta` is no stand-in.
    """
    pickled = BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(state)

    with zipfile.ZipFile(file, "w") as archive:

        def write(name: str, values: Any) -> None:
            record = zipfile.ZipInfo(f"{_FOLDER}/{name}")
            begin = file.tell() + _HEADER + len(record.filename) + _PADDING_HEAD + _LONG_SIZES
            padding = -begin % _ALIGNED
            record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
            with archive.open(record, "w", force_zip64=True) as opened:
                opened.write(values)

        write("data.pkl", pickled.getvalue())
        write(".format_version", b"1")
        write(".storage_alignment", str(_ALIGNED).encode())
        write("byteorder", sys.byteorder.encode())
        for number, fetch in enumerate(pickler.records):
            write(f"data/{number}", fetch().contiguous().view(-1).view(torch.uint8).numpy())
        write("version", b"3\n")


class _Pickler(pickle.Pickler):
    """Pickles a state with numbers of records in place of values.

    torch pickles a tensor as a call of a function, of whose arguments one is a storage.

    Attributes:
        records: each returns the values of its number.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, _PROTOCOL)
        self.records: list[Callable[[], Tensor]] = []
        self._numbers: dict[Any, int] = {}
        self._stand_ins: dict[int, tuple[Any, Tensor]] = {}  # by the id of an empty storage

    @override
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return NotImplemented
        if not is_stand_in(value):
            raise RuntimeError(
                f"A tensor of shape {list(value.shape)} in the checkpoint has no values: a hook has"
                " computed it from one that is put together only when the file is written. In"
                " `on_save_checkpoint` keep, rename or remove such entries. To compute with whole"
                " ones, which rank 0 then holds all at once, give the Trainer the plugin"
                " `lightning.pytorch.plugins.TorchCheckpointIO()`."
            )
        empty: Any = torch.empty(0, dtype=value.dtype)
        rebuild, (storage, _, _, _, *others) = empty.__reduce_ex__(_PROTOCOL)
        self._stand_ins[id(storage)] = storage, value
        return rebuild, (storage, 0, tuple(value.shape), value.stride(), *others)

    @override
    def persistent_id(self, value: Any) -> Any:
        if not torch.is_storage(value):
            return None
        storage: Any = value
        kind, width = "UntypedStorage", 1
        if isinstance(value, torch.storage.TypedStorage):
            kind = value._pickle_storage_type()  # type: ignore[no-untyped-call]
            width = value.dtype.itemsize
            storage = value._untyped_storage
        _, stand_in = self._stand_ins.get(id(value), (None, None))

        key: Any
        if stand_in is None:
            key, size = (kind, storage.device, storage.data_ptr()), storage.nbytes()
            record = partial(_bytes_of, storage)
        else:
            key, size, record = id(stand_in), stand_in.nbytes, partial(values_of, stand_in)
        if key not in self._numbers:
            self._numbers[key] = len(self.records)
            self.records.append(record)
        return "storage", getattr(torch, kind), str(self._numbers[key]), "cpu", size // width


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()


FilePath = str | Path

_WRITING = ".writing"  # ends the hidden name
_FOLDER_BIT = 0x10  # of a record's attributes in a zip archive


def write_whole(state: Any, path: FilePath) -> None:
    """Write what `torch.save` writes; folders are made.

    Args:
        state: of tensors and other values; they must not change meanwhile. Stand-ins
            (`comm.wholes`) are fetched one after another where the file is on a disk.
        path: of the file. On another kind of file system than a disk, that one's transaction has to
            keep it whole.

    Raises:
        RuntimeError: it cannot be written; what was there before is as it was.
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
    """A file, for `torch.save` and `write_archive`.

    After an error it writes nothing more and counts on: torch, which would come down over a half
    file with an error of its own, ends as usual, and how much there is to write is known then. So
    do ranks that hold parts of what is written.
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
        target = cast("IO[bytes]", self)  # three methods of it are called
        if has_stand_ins(state):
            write_archive(state, target)
        else:
            torch.save(state, target)
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

    def tell(self) -> int:
        return self.needed

    def flush(self) -> None:
        """The file is flushed at the end."""


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot; they need not
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
        RuntimeError: the file is damaged, or holds what only unpickling loads; with its name and
            what to do.
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
            f" `Trainer.fit`, or `--trust` to `one_file`. What was found: {error}"
        ) from error


@contextmanager
def reading_whole(path: FilePath) -> Iterator[None]:
    """In the body a checkpoint is read, by whatever plugin.

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

    Files of other kinds, and those on other file systems than this machine's, are not looked at.

    Raises:
        RuntimeError: a record is another one than was written.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return
    try:
        if zipfile.is_zipfile(local):
            check_records(local)
    except Exception as error:  # whatever a damaged directory makes zipfile raise
        raise damaged(path, error) from error


def check_records(archive: Path | IO[bytes]) -> None:
    """Compare every record of an archive that `torch.save` wrote with its checksum.

    Raises:
        ValueError: a record is another one than was written. A damaged directory makes zipfile
            raise anything.
    """
    with zipfile.ZipFile(archive) as opened:
        records = opened.infolist()
        # torch reads nothing where one is said to be a folder, and does not notice
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
    """Return the path of a file on this machine, None for what fsspec reaches otherwise."""
    fs, place = url_to_fs(str(path))
    return Path(place) if "file" in fs.protocol else None


def _is_archive(path: FilePath) -> bool:
    """Return whether the file ends as `torch.save` ends one: a cut file is no archive."""
    with fsspec.open(str(path), "rb") as file:
        try:
            return zipfile.is_zipfile(file)
        except zipfile.BadZipFile:  # it ends in a damaged way
            return False
