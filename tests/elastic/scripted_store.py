"""Accesses of one replica to a store that fail or answer late at chosen requests."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

from lightning_commfree.stores.store import Keys, StoreError

# (verb, key, request) -> the answer of the request, another one, or a StoreError
Rule = Callable[[str, str, Callable[[], Any]], Any]


class ScriptedStore:
    """A `Store` in front of another one, in which a rule carries out each request, or does not."""

    def __init__(self, store: Any, rule: Rule) -> None:
        self.address, self.store, self.rule = store.address, store, rule

    def create(self, key: str, data: bytes) -> bool:
        return bool(self.rule("create", key, lambda: self.store.create(key, data)))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self.rule("get", key, lambda: self.store.get(key))
        return found

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        data = self.get(key)
        return None if data is None else data[start : start + length]

    def list(self, prefix: str) -> Keys:
        keys: Keys = self.rule("list", prefix, lambda: self.store.list(prefix))
        return keys

    def delete(self, key: str) -> None:
        self.rule("delete", key, lambda: self.store.delete(key))

    def overwrite(self, key: str, data: bytes) -> None:
        self.rule("overwrite", key, lambda: self.store.overwrite(key, data))


def refused(verb: str) -> StoreError:
    return StoreError("scripted", verb, "refused (test)")


class Eventual:
    """Rule: what others have created or overwritten appears only after up to `late` looks at it."""

    def __init__(self, late: int) -> None:
        self.late, self.hidden = late, 0
        self._mine: set[str] = set()
        self._looks: dict[tuple[str, bytes], int] = {}
        self._shown: dict[str, bytes] = {}  # by key, the latest value that was shown
        self._lock = threading.Lock()

    def __call__(self, verb: str, key: str, request: Callable[[], Any]) -> Any:
        found = request()
        if verb in ("create", "overwrite"):
            if found is not False:
                self._mine.add(key)
        elif verb == "get" and found is not None and key not in self._mine:
            with self._lock:
                looks = self._looks[key, found] = self._looks.get((key, found), 0) + 1
                if looks <= 1 + zlib.crc32(key.encode()) % self.late:
                    self.hidden += 1
                    return self._shown.get(key)
                self._shown[key] = found
        return found
