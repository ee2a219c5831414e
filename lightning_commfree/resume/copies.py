"""Copy checkpoints to ranks that do not share a disk with the rank that saved them.

Without a shared disk, rank 0 writes a checkpoint to its own disk, and every other rank writes its
rank file to its own disk. On resume, files that a rank needs but does not have are sent over the
channel between all ranks:

1. The ranks agree on a checkpoint. A rank without a path (because `ckpt_path="last"` found no
   checkpoint on its disk) uses the path of the first rank that has one.
2. The first rank that has the checkpoint sends it to the ranks that do not have it.
3. These ranks load a hidden copy beside the path, which is removed after all ranks have loaded it.
   If it were kept, the next resume might use this old checkpoint.
4. Rank files are sent in the same way. They can be kept until the next save, because their folder
   is unique to a save.

If all ranks share a disk, they have the same files, and nothing is sent.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_commfree.comm.handshake import gather_texts
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.resume.files import FilePath, local_path
from lightning_commfree.resume.folders import REST

TAG = "checkpoint"  # ledger tag
CHUNK_BYTES = 2**25
_TAIL_BYTES = 2**20  # end of a file, which contains the checksums of its records

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of the job, and small collectives over them (`fit.ranks.Ranks`)."""

    @property
    def channels(self) -> ReplicaChannels:
        """The open channels."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks in the job."""

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return rank `src`'s value on all ranks."""

    def all_flags(self, mine: bool) -> list[bool]:
        """Gather a flag from every rank, in rank order."""

    def fail_together(self) -> AbstractContextManager[None]:
        """Context manager that raises an error on all ranks if its block fails on any."""


def find_checkpoint(ranks: Ranks, path: FilePath | None) -> FilePath | None:
    """Return a path from which this rank can load the checkpoint, copied if needed; collective.

    `path` is this rank's own, or None if it found no checkpoint. The result is `path`, another
    rank's path or that of a temporary copy; None if no rank has a path. All ranks raise a
    RuntimeError if ranks have different checkpoints, or if a copy cannot be written.
    """
    world = ranks.channels.world
    paths = gather_texts(world, str(path or ""))
    if not any(paths):
        return None
    path = path or next(filter(None, paths))
    local = local_path(path)
    found = gather_texts(world, "remote" if local is None else _identity(local))
    have = [rank for rank, identity in enumerate(found) if identity]
    for rank in have:
        if found[rank] != found[have[0]]:
            first, other = (f"{paths[r] or path!s} (rank {r})" for r in (have[0], rank))
            raise RuntimeError(
                f"The ranks have different checkpoints: {first} is not the same file as {other}."
                " One of them is probably from an earlier fit, in which rank 0 ran on another"
                " machine. Keep the one to resume from and delete the other: ranks without a"
                " checkpoint get a copy."
            )
    if local is None or all(found) or not have:  # if no rank has it, Lightning raises
        return path
    copy = None if found[ranks.rank] else local.with_name(f".{local.name}.received")
    send(ranks, have[0], local, copy)
    return copy or path


def drop_copy(path: FilePath | None) -> None:
    """Remove `path` if it is a temporary copy made by `find_checkpoint`; keep any other file."""
    local = None if path is None else local_path(path)
    if local is not None and local.name.startswith(".") and local.name.endswith(".received"):
        _remove(local)


def send(ranks: Ranks, source: int, path: Path, target: Path | None) -> None:
    """Send a file or folder from the rank `source` to others in chunks; collective.

    `target` is the path for this rank's copy, which is never left incomplete; None if it needs
    none. All ranks raise a RuntimeError if a disk cannot be read or written.
    """

    @contextmanager
    def on_disk() -> Iterator[None]:
        """Context manager that raises a disk's error on all ranks; collective."""
        with ranks.fail_together():
            try:
                yield
            except OSError as error:
                raise RuntimeError(
                    f"Rank {source} cannot send {path.name!r} to another machine: {error} (on rank"
                    f" {ranks.rank}). Nothing was loaded. Free up disk space on that machine, or"
                    " copy the checkpoint by hand to the same path on each machine, along with the"
                    " `.commfree` folder next to it."
                ) from error

    pieces: list[tuple[str, int, int]] = []
    with on_disk():
        if ranks.rank == source:
            pieces = _pieces(path)
        if target is not None:
            partial = target.with_name(f".{target.name}.receiving")
            partial.parent.mkdir(parents=True, exist_ok=True)
            _remove(partial)  # left by a killed process
    pieces = ranks.broadcast(pieces, source)
    size_mb = sum(size for _, _, size in pieces) / 1e6
    name = Path(pieces[0][0]).parts[0]
    rank_zero_info(
        f"Rank {source} is sending {name!r} ({size_mb:,.2f} MB) to ranks that do not have it."
    )
    with on_disk():
        writes = target is not None and _create_folder(partial)

    for file, start, size in pieces:
        piece = bytearray(size)
        with on_disk():
            if ranks.rank == source:
                _read_into(path.parent / file, start, piece)
        if piece:
            chunk = torch.frombuffer(piece, dtype=torch.uint8)
            ranks.channels.world.broadcast(chunk, TAG, source).wait()
        with on_disk():
            if writes:
                _append(partial / file, piece)

    with on_disk():
        if target is not None and writes:
            _remove(target)
            os.replace(partial / name, target)
            partial.rmdir()


def _identity(path: Path) -> str:
    """Return a string that identifies a checkpoint's contents, or "" if `path` does not exist."""
    if not path.exists():
        return ""
    file = path / REST if path.is_dir() else path
    if not file.exists():  # a folder written by a user's plugin
        return "folder"
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(size - _TAIL_BYTES, 0))
        return f"{size} bytes {zlib.crc32(opened.read()):08x}"


def _pieces(path: Path) -> list[tuple[str, int, int]]:
    """Split a file or folder into chunks, each a tuple (file, start in bytes, size in bytes).

    File names are relative to the parent of `path`.
    """
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return [
        (str(file.relative_to(path.parent)), start, min(size - start, CHUNK_BYTES))
        for file in files
        for size in [file.stat().st_size]
        for start in range(0, max(size, 1), CHUNK_BYTES)
    ]


def _create_folder(folder: Path) -> bool:
    """Create a folder; return False if another rank on the same disk has already created it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _read_into(file: Path, start: int, piece: bytearray) -> None:
    """Fill `piece` from byte `start` of a file; raise an `OSError` if the file is too short."""
    with file.open("rb") as opened:
        opened.seek(start)
        if opened.readinto(piece) != len(piece):
            raise OSError(f"{str(file)!r} was truncated while it was being read")


def _append(file: Path, piece: bytearray) -> None:
    """Append to a file; create it and its folder if they do not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(piece)


def _remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # another rank on the same disk may be faster
    else:
        path.unlink(missing_ok=True)
