from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from lightning_commfree.stores.folder import FolderStore
from lightning_commfree.stores.store import StoreError, StoreLostError
from tests.stores.contract import check_contract

BIG = bytes(20 << 20)


def test_a_folder_keeps_the_contract(tmp_path: Path) -> None:
    check_contract(FolderStore(tmp_path))


def test_two_stores_in_one_folder_are_one(tmp_path: Path) -> None:
    first, second = FolderStore(tmp_path), FolderStore(tmp_path)
    assert first.create("a", b"1")
    assert not second.create("a", b"2")
    assert second.get("a") == b"1"


def test_an_unmounted_share_is_an_outage_and_not_an_empty_store(tmp_path: Path) -> None:
    share, aside = tmp_path / "share", tmp_path / "aside"
    share.mkdir()
    store = FolderStore(share)
    assert store.create("a/1", b"1")
    share.rename(aside)
    share.mkdir()  # the mount point
    for request in (
        lambda: store.get("a/1"),
        lambda: store.get_range("a/1", 0, 1),
        lambda: store.create("a/1", b"2"),
        lambda: store.overwrite("a/1", b"2"),
        lambda: store.delete("a/1"),
        lambda: store.list(""),
    ):
        with pytest.raises(StoreError, match="not mounted"):
            request()
    assert list(share.iterdir()) == []
    FolderStore(share)  # somebody takes the mount point for a new store
    with pytest.raises(StoreLostError, match="replaced by another"):
        store.get("b")
    for path in (share / ".parts", share / ".store"):
        path.rmdir() if path.is_dir() else path.unlink()
    share.rmdir()
    aside.rename(share)
    assert store.get("a/1") == b"1"


def test_a_link_whose_answer_was_lost_was_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client repeats the request, and the server says that the name exists."""
    store, link = FolderStore(tmp_path), os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert store.create("a", b"1")
    assert not store.create("a", b"1")


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path: Path) -> None:
    FolderStore(tmp_path)
    old, new = tmp_path / ".parts" / "old", tmp_path / ".parts" / "new"
    old.touch()
    new.touch()
    day_ago = time.time() - 90_000
    os.utime(old, (day_ago, day_ago))
    FolderStore(tmp_path)
    assert not old.exists()
    assert new.exists()


def _create_without_end(root: Path) -> None:
    store = FolderStore(root)
    for count in range(10_000):
        store.create(f"big/{count}", BIG)


def test_a_process_killed_in_a_create_leaves_no_half_value(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("fork").Process(
        target=_create_without_end, args=(tmp_path,)
    )
    writer.start()
    parts, deadline = tmp_path / ".parts", time.monotonic() + 20
    while not any(0 < _size(part) < len(BIG) for part in parts.glob("*")):
        assert time.monotonic() < deadline
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    store = FolderStore(tmp_path)
    assert all(_size(tmp_path / key) == len(BIG) for key in store.list("big/"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
