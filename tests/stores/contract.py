"""What every store keeps: checks that the tests of each store run."""

from __future__ import annotations

import os
import threading

import pytest

from lightning_commfree.stores.store import Store, probe

MB = 1 << 20


def check_contract(store: Store) -> None:
    probe(store)
    check_verbs(store)
    check_keys(store)
    check_big_values(store)
    check_race(store)


def check_verbs(store: Store) -> None:
    assert store.get("a/1") is None
    assert store.get_range("a/1", 0, 1) is None
    store.delete("a/1")
    data = bytes(range(256))
    assert store.create("a/1", data)
    assert not store.create("a/1", b"other")
    assert store.get("a/1") == data
    assert store.get_range("a/1", 10, 5) == data[10:15]
    assert store.get_range("a/1", 250, 50) == data[250:]
    assert store.create("a/2", b"")
    assert store.get("a/2") == b""
    assert store.create("ab", b"x")
    assert store.list("a/") == ["a/1", "a/2"]
    assert store.list("") == ["a/1", "a/2", "ab"]
    assert store.list("nothing/") == []
    store.overwrite("head", b"1")
    store.overwrite("head", b"22")
    assert store.get("head") == b"22"
    for key in ("a/1", "a/2", "ab", "head"):
        store.delete(key)
        store.delete(key)
    assert store.list("") == []
    assert store.create("a/1", b"again")
    store.delete("a/1")


def check_keys(store: Store) -> None:
    for key in ("", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a b", "ä", "a\n"):
        for request in (store.get, store.delete, lambda key: store.create(key, b"")):
            with pytest.raises(ValueError, match="not a legal key"):
                request(key)
    for prefix in ("a", "/", "../"):
        with pytest.raises(ValueError, match="not a legal prefix"):
            store.list(prefix)


def check_big_values(store: Store) -> None:
    data = os.urandom(20 * MB)
    assert store.create("big", data)
    assert not store.create("big", data[:-1])
    assert store.get("big") == data
    for start, stop in ((4 * MB - 5, 8 * MB + 7), (4 * MB, 8 * MB), (20 * MB - 3, 20 * MB)):
        assert store.get_range("big", start, stop - start) == data[start:stop]
    store.delete("big")
    assert store.get("big") is None


def check_race(store: Store) -> None:
    """Eight threads create thirty keys: one winner each, whose data everybody reads."""
    winners: list[tuple[int, int]] = []

    def race(thread: int) -> None:
        for key in range(30):
            if store.create(f"race/{key}", str(thread).encode()):
                winners.append((key, thread))

    threads = [threading.Thread(target=race, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key for key, _ in winners) == list(range(30))
    assert all(store.get(f"race/{key}") == str(thread).encode() for key, thread in winners)
