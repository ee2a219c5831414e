"""Files that are made once and found again: by the next run and by ranks that start together."""

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
    """Return a short key of everything that decides what a cached file contains.

    Args:
        *parts: strings, numbers, lists and dicts (anything that JSON can write).
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
    """Return `path`, made by `build` if it is not there yet.

    Safe when several processes start together: one of them builds, under a lock and beside the
    place where the result belongs, and renames; the others wait. A build that is interrupted leaves
    nothing at `path`.

    Args:
        path: a file or folder; never half written.
        build: makes the file or folder at the path it is given.
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
