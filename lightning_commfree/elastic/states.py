"""Outer states of an elastic job in its store (`elastic.log`).

    part/WHICH.NAME.R.I   the I-th 16 MB of the state of rank R, from the replica NAME
    state/WHICH           that NAME, and how many parts the state of each rank has

A state is stored in parts because a bucket takes at most 5 GB at once, and because a request that
fails is repeated as a whole. `state/WHICH` is created after them, so who finds it finds all. If
several replicas store one state, the first that completes it wins. Parts of two replicas cannot be
mixed, because they have different keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from lightning_commfree.elastic.parts import opened_from, sealed
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.stores.retrying import Retrying

PART_BYTES = 16 << 20


class States:
    """The outer states, as one rank of the replica `name` stores and reads them."""

    def __init__(self, store: Retrying, name: str, ranks: ReplicaRanks) -> None:
        self.store, self._name, self._ranks = store, name, ranks

    def create(self, which: str, data: bytes, gather: Callable[[int], list[int]]) -> None:
        """Store this rank's state; rank 0 completes it. Collective, through `gather`."""
        starts = range(0, len(data), PART_BYTES)
        for i, start in enumerate(starts):
            key = self._key(which, self._name, self._ranks.rank, i)
            self.store.create(key, sealed([data[start:][:PART_BYTES]]))
        counts = gather(len(starts))
        if self._ranks.rank:
            return
        if not self.store.create(f"state/{which}", json.dumps([self._name, counts]).encode()):
            self._delete_parts(which, self._name)  # another replica was faster

    def read(self, which: str) -> bytes | None:
        """Return this rank's state; None if there is none, or if it is being deleted."""
        found = self.store.get(f"state/{which}")
        if found is None:
            return None
        name, counts = json.loads(found)
        parts: list[memoryview] = []
        for i in range(counts[self._ranks.rank]):
            key = self._key(which, name, self._ranks.rank, i)
            if (data := self.store.get(key)) is None:
                return None
            parts += opened_from(self.store.address, key, data)
        return b"".join(parts)

    def is_complete(self, which: str) -> bool:
        """Return whether all ranks of a replica have stored this state."""
        return self.store.get_range(f"state/{which}", 0, 1) is not None

    def delete(self, which: str, names: Iterable[str]) -> None:
        """Delete a state of all ranks, and what replicas of these names have stored of it."""
        self.store.delete(f"state/{which}")  # first: nobody should begin to read it
        for name in names:
            self._delete_parts(which, name)

    def _delete_parts(self, which: str, name: str) -> None:
        """Delete the parts from one replica, which may have died before it had stored all."""
        for rank in range(self._ranks.size):
            count = 0
            while self.store.get_range(self._key(which, name, rank, count), 0, 1) is not None:
                count += 1
            for i in reversed(range(count)):  # if this ends early, the rest will still be found
                self.store.delete(self._key(which, name, rank, i))

    @staticmethod
    def _key(which: str, name: str, rank: int, i: int) -> str:
        return f"part/{which}.{name}.{rank}.{i}"
