"""A store in a folder: a local disk for processes on one machine, or an NFS share.

A value is written to `.parts/`, synced, and linked to its key: a link is atomic, also on NFS, and
fails if the key exists. The file `.store` identifies the store. Without it, the share is not
mounted, which is an outage and not a store without keys. Folders that a program synchronizes
(Dropbox, Syncthing) have no atomic create, and nothing here can find that out.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_commfree.stores.store import (
    Keys,
    StoreError,
    StoreLostError,
    check_key,
    check_prefix,
)

_ABANDONED_S = 86400.0  # age at which a file in `.parts/` belongs to a process that was killed


class FolderStore:
    """A `Store` in an existing folder. It holds no lock and keeps no file open."""

    def __init__(self, root: Path) -> None:
        self.address = f"file://{root}"
        self._root, self._parts, self._marker = root, root / ".parts", root / ".store"
        if not root.is_dir():
            raise ValueError(
                f"The folder {root} of the store does not exist on this machine. Mount the share,"
                " or create the folder."
            )
        try:
            self._parts.mkdir(exist_ok=True)
            self._link(self._marker, uuid.uuid4().hex.encode())
            self._identity = self._marker.read_bytes()
            self._remove_abandoned()
        except OSError as error:
            needs = "The folder must be writable, and its file system must support hard links."
            raise StoreError(self.address, "open", f"{error}. {needs}") from error

    def create(self, key: str, data: bytes) -> bool:
        """Link a synced file to the key, unless it exists; return whether this call did."""
        path = self._root / check_key(key)
        with self._reporting("create"):
            self._check_mounted()
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            return self._link(path, data)

    def get(self, key: str) -> bytes | None:
        """Read the whole file; None if the key is absent."""
        return self._read("get", key, 0, -1)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Read a part of the file; None if the key is absent."""
        return self._read("get_range", key, start, length)

    def list(self, prefix: str) -> Keys:
        """Walk over the folder of the prefix, and return the keys in it, sorted."""
        folder = self._root / check_prefix(prefix)
        with self._reporting("list"):
            self._check_mounted()
            paths = [path.relative_to(self._root) for path in folder.rglob("*") if path.is_file()]
        return sorted(path.as_posix() for path in paths if path.parts[0][0] != ".")

    def delete(self, key: str) -> None:
        """Remove the file. Its folder stays."""
        path = self._root / check_key(key)
        with self._reporting("delete"):
            self._check_mounted()
            path.unlink(missing_ok=True)

    def overwrite(self, key: str, data: bytes) -> None:
        """Rename a synced file over the old one."""
        path = self._root / check_key(key)
        with self._reporting("overwrite"):
            self._check_mounted()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(data).replace(path)

    def _read(self, verb: str, key: str, start: int, length: int) -> bytes | None:
        """Read `length` bytes (-1: all) from `start` on, or return None if the key is absent."""
        path = self._root / check_key(key)
        with self._reporting(verb):
            for look in (1, 2):
                try:
                    with path.open("rb") as file:
                        file.seek(start)
                        return file.read(length)
                except FileNotFoundError:
                    if look == 1:
                        self._revalidate(path)
            self._check_mounted()
        return None

    def _revalidate(self, path: Path) -> None:
        """Open the folders above a key, so that an NFS client looks for the key again.

        An NFS client remembers for up to a minute that a name is absent; opening a folder makes it
        ask the server whether the folder has changed.
        """
        with suppress(FileNotFoundError):
            for part in reversed(path.relative_to(self._root).parents):
                os.close(os.open(self._root / part, os.O_RDONLY))

    def _check_mounted(self) -> None:
        """Raise an OSError if the marker is absent, and a StoreLostError if it is another one."""
        try:
            identity = self._marker.read_bytes()
        except FileNotFoundError:
            raise OSError(f"{self._root} is not mounted, or its file .store was removed") from None
        if identity != self._identity:
            raise StoreLostError(self.address)

    def _link(self, path: Path, data: bytes) -> bool:
        """Link a synced file with `data` to `path`; return False if `path` exists."""
        part = self._write(data)
        try:
            os.link(part, path)
        except FileExistsError:
            # NFS repeats a link whose answer was lost: then it was ours, and has two names.
            if part.stat().st_nlink != 2:
                return False
        finally:
            part.unlink()
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # a key must not disappear in a power failure once others have read it
        finally:
            os.close(folder)
        return True

    def _write(self, data: bytes) -> Path:
        """Write `data` to a new synced file in `.parts/`, and return its path."""
        part = self._parts / uuid.uuid4().hex
        try:
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # such as a full disk
            with suppress(OSError):
                part.unlink()
            raise
        return part

    def _remove_abandoned(self) -> None:
        """Remove parts older than a day: processes that were killed have left them."""
        for part in self._parts.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _ABANDONED_S:
                    part.unlink()

    @contextmanager
    def _reporting(self, verb: str) -> Iterator[None]:
        """Context manager that turns an OSError into a `StoreError` of the request `verb`."""
        try:
            yield
        except OSError as error:
            raise StoreError(self.address, verb, error) from error
