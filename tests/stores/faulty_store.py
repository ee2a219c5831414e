"""A store that fails as stores do: it refuses, loses answers, is away, and lists late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_commfree.stores.store import Keys, Store, StoreError


class FaultyStore:
    """A `Store` in front of another one, whose faults are drawn from a seed.

    Args:
        store: the store.
        refused: probability that a request fails and is not carried out.
        lost: probability that a request is carried out and its answer lost.
        delay_s: time that every request takes.
        late_listing: a listing contains no key that was created since the last listing.
    """

    def __init__(
        self,
        store: Store,
        *,
        refused: float = 0.0,
        lost: float = 0.0,
        delay_s: float = 0.0,
        late_listing: bool = False,
        seed: int = 0,
    ) -> None:
        self.address = store.address
        self.away = False  # set to True for an outage
        self._store, self._refused, self._lost = store, refused, lost
        self._delay_s, self._late_listing = delay_s, late_listing
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._created_lately: set[str] = set()

    def create(self, key: str, data: bytes) -> bool:
        created: bool = self._ask("create", lambda: self._store.create(key, data))
        with self._lock:
            self._created_lately.add(key)
        return created

    def get(self, key: str) -> bytes | None:
        return self._ask("get", lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return self._ask("get_range", lambda: self._store.get_range(key, start, length))

    def list(self, prefix: str) -> Keys:
        keys = self._ask("list", lambda: self._store.list(prefix))
        with self._lock:
            late, self._created_lately = self._created_lately, set()
        return [key for key in keys if not (self._late_listing and key in late)]

    def delete(self, key: str) -> None:
        self._ask("delete", lambda: self._store.delete(key))

    def overwrite(self, key: str, data: bytes) -> None:
        self._ask("overwrite", lambda: self._store.overwrite(key, data))

    def _ask(self, verb: str, request: Callable[[], Any]) -> Any:
        with self._lock:
            drawn = self._random.random()
        time.sleep(self._delay_s)
        if self.away or drawn < self._refused:
            raise StoreError(self.address, verb, "refused (test)")
        found = request()
        if drawn < self._refused + self._lost:
            raise StoreError(self.address, verb, "answer lost (test)")
        return found
