"""Build cached files once, for later runs and for ranks that start at the same time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from recipes.stages import stage


def cache_key(*parts: object) -> str:
    """Return a short hash of everything that determines the content of a cached file.

    Args:
        *parts: anything that JSON can represent.
    """
    written = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(f"{path}.lock")
    with stage(f"waiting for another process that makes {path.name}"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Return `path`; call `build` to create it if it does not exist.

    Safe when several processes start together: one of them holds a lock, builds in a temporary
    place and renames the result, while the others wait. An interrupted build leaves nothing at
    `path`.

    Args:
        path: of a file or folder.
        build: creates the file or folder at the path that it is given.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if path.exists():
            return path
        workshop = Path(tempfile.mkdtemp(prefix=".building-", dir=path.parent))
        try:
            build(workshop / path.name)
            os.replace(workshop / path.name, path)
        finally:
            shutil.rmtree(workshop)
    return path
