"""Share decisions between the ranks of an elastic replica, through their job's TCPStore.

Most of these decisions are made on a background thread. That thread cannot use a channel, because
the training thread uses the channels at the same time. Every rank must make the same calls in the
same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class ReplicaRanks:
    """Exchanges small JSON values between the ranks of one replica, through a key-value store.

    By default, the replica has a single rank, which needs no store.

    Args:
        rank: rank of this process in the replica.
        size: number of ranks in the replica.
        store: client of a store that all ranks share; no other object may use this client.
        name: prefix of the keys; unique for each fit.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None, name: str = "") -> None:
        self.rank, self.size = rank, size
        self._store, self._name, self._calls = store, name, 0
        assert store is not None or size == 1, "several ranks need a store"

    def share(self, make: Callable[[], Any]) -> Any:
        """Call `make` on the first rank only, and return its result, a JSON value, on all ranks.

        Raises:
            RuntimeError: `make` raised a `RuntimeError`; raised on all ranks.
        """
        if self.size == 1:
            return make()
        key = self._next_key()
        if self.rank:
            value, error = json.loads(self._store.get(key))
            if error:
                raise RuntimeError(error)
            return value
        value, error = None, ""
        try:
            value = make()
        except RuntimeError as raised:
            error = str(raised)
            raise
        finally:
            self._store.set(key, json.dumps((value, error)))
        return json.loads(json.dumps(value))  # as the other ranks see it

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value from every rank, in rank order."""
        if self.size == 1:
            return [value]
        key = self._next_key()
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]

    def all(self, value: bool) -> bool:
        """Return whether `value` is True on all ranks."""
        return all(self.gather(value))

    def _next_key(self) -> str:
        self._calls += 1
        return f"commfree/{self._name}/{self._calls}"
