"""Repeat failed requests of a store, and count all requests."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from lightning_commfree.stores.store import Keys, Store, StoreError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
Result = TypeVar("Result")


@dataclass
class VerbCount:
    """Counts of the requests with one verb so far; bytes are those of values, without headers."""

    requests: int = 0
    failures: int = 0  # of the requests
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0  # in requests, without the pauses between them


class Retrying:
    """A `Store` that repeats failed requests of another one, with growing, random pauses.

    A repeated `create` whose earlier answer was lost returns True if the stored data are its own.
    Two processes that create one key with equal data may then both be told True, so data that name
    a winner must contain a unique name.

    Args:
        store: the store.
        timeout_s: after so long, a request raises its last `StoreError` instead of being repeated.
        stop: when set, pauses end and failed requests raise at once.
    """

    def __init__(
        self, store: Store, timeout_s: float = math.inf, stop: threading.Event | None = None
    ) -> None:
        self.address = store.address
        self._store, self._timeout_s = store, timeout_s
        self._stop = threading.Event() if stop is None else stop
        self.failed_s = -math.inf  # when a request last failed, by the monotonic clock
        # for how long the store was away in all: from a request that failed until other processes,
        # whose requests failed at the same time, have repeated them
        self.away_s, self._back_s = 0.0, -math.inf
        self._counts: dict[str, VerbCount] = {}
        self._lock = threading.Lock()

    def counts(self) -> dict[str, VerbCount]:
        """Return a copy of the counts of requests, failures, bytes and seconds so far, by verb."""
        with self._lock:
            return {verb: replace(count) for verb, count in self._counts.items()}

    def create(self, key: str, data: bytes) -> bool:
        """Store a value if the key is absent, and return whether this call or an earlier try did.

        After a try whose answer was lost, compare the stored data with `data`.
        """
        tries = 0

        def create_once() -> bool:
            nonlocal tries
            tries += 1
            return self._store.create(key, data)

        created = self._repeat("create", create_once, len(data))
        return created or (tries > 1 and self.get(key) == data)

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if the key is absent."""
        return self._repeat("get", lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Return a part of a value, or None if the key is absent."""
        return self._repeat("get_range", lambda: self._store.get_range(key, start, length))

    def list(self, prefix: str) -> Keys:
        """Return the keys that begin with a prefix."""
        return self._repeat("list", lambda: self._store.list(prefix))

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._repeat("delete", lambda: self._store.delete(key))

    def overwrite(self, key: str, data: bytes) -> None:
        """Store a value whether or not the key exists."""
        self._repeat("overwrite", lambda: self._store.overwrite(key, data), len(data))

    def _repeat(self, verb: str, request: Callable[[], Result], sent_bytes: int = 0) -> Result:
        """Run a request until it succeeds, times out or is stopped; count each try under `verb`."""
        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        deadline = began_s + self._timeout_s
        while True:
            began = time.perf_counter()
            try:
                result = request()
            except StoreError:
                # their pause may be the next longer one
                self._add_outage(began_s, min(2 * pause_s, _LONGEST_PAUSE_S))
                self._count(verb, VerbCount(1, 1, sent_bytes, 0, time.perf_counter() - began))
                left_s = deadline - time.monotonic()
                # random, so that replicas do not come back from an outage all at once
                chosen_s = pause_s * random.uniform(0.5, 1.0)  # not seeded: never affects values
                if left_s <= 0 or self._stop.wait(min(chosen_s, left_s)):
                    raise
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                received = len(result) if isinstance(result, bytes) else 0
                seconds = time.perf_counter() - began
                self._count(verb, VerbCount(1, 0, sent_bytes, received, seconds))
                return result

    def _add_outage(self, began_s: float, pause_s: float) -> None:
        """Add an outage, from `began_s` until `pause_s` from now, to `away_s`, without overlaps."""
        with self._lock:
            self.failed_s = time.monotonic()
            back_s = self.failed_s + pause_s
            self.away_s += max(back_s - max(began_s, self._back_s), 0.0)
            self._back_s = max(back_s, self._back_s)

    def _count(self, verb: str, request: VerbCount) -> None:
        """Add the counts of one request to those of its verb."""
        with self._lock:
            count = self._counts.setdefault(verb, VerbCount())
            count.requests += request.requests
            count.failures += request.failures
            count.sent_bytes += request.sent_bytes
            count.received_bytes += request.received_bytes
            count.seconds += request.seconds
