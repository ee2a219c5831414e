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

from lightning_commfree.elastic.parts import SEAL_BYTES, opened_from, sealed
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.stores.retrying import Retrying

PART_BYTES = (16 << 20) - SEAL_BYTES  # with its seal, one request of a bucket (`stores.objects`)


class States:
    """The outer states, as one rank of the replica `name` stores and reads them."""

    def __init__(self, store: Retrying, name: str, ranks: ReplicaRanks) -> None:
        self.store, self._name, self._ranks = store, name, ranks

    def create(self, which: str, data: bytes, gather: Callable[[int], list[int]]) -> None:
        """Store this rank's state; rank 0 completes it. Collective, through `gather`."""
        is_first = self._ranks.rank == 0
        if gather(is_first and self.is_complete(which))[0]:
            return
        starts = range(0, len(data), PART_BYTES)
        for i, start in enumerate(starts):
            key = self._key(which, self._name, self._ranks.rank, i)
            self.store.create(key, sealed([data[start : start + PART_BYTES]]))
        counts = gather(len(starts))
        if is_first and not self.store.create(f"state/{which}", self._record(counts)):
            name, _ = self._find(which) or (self._name, [])
            if name != self._name:  # another replica was faster
                self._delete_parts(which, self._name, counts)

    def read(self, which: str) -> bytes | None:
        """Return this rank's state; None if the store does not show all of it."""
        found = self._find(which)
        if found is None:
            return None
        name, counts = found
        parts: list[memoryview] = []
        for i in range(counts[self._ranks.rank]):
            key = self._key(which, name, self._ranks.rank, i)
            if (data := self.store.get(key)) is None:
                return None
            parts += opened_from(self.store.address, key, data)
        return b"".join(parts)

    def is_complete(self, which: str) -> bool:
        """Return whether all ranks of a replica have stored this state."""
        return self._find(which) is not None

    def delete(self, which: str, names: Iterable[str]) -> None:
        """Delete a state of all ranks, and what replicas of these names have stored of it."""
        if found := self._find(which):
            self._delete_parts(which, *found)
            self.store.delete(f"state/{which}")  # last: whoever finds it deletes the parts again
        for name in names:  # they may have died before they had stored all
            counts = [self._count(which, name, rank) for rank in range(self._ranks.size)]
            self._delete_parts(which, name, counts)

    def _record(self, counts: list[int]) -> bytes:
        return json.dumps([self._name, counts]).encode()

    def _find(self, which: str) -> tuple[str, list[int]] | None:
        """Return the name and the numbers of parts in a record; None if there is none."""
        found = self.store.get(f"state/{which}")
        if found is None:
            return None
        name, counts = json.loads(found)
        return name, counts

    def _count(self, which: str, name: str, rank: int) -> int:
        """Return how many parts of a rank are there, without a gap."""
        count = 0
        while self.store.get_range(self._key(which, name, rank, count), 0, 1) is not None:
            count += 1
        return count

    def _delete_parts(self, which: str, name: str, counts: list[int]) -> None:
        for rank, count in enumerate(counts):
            for i in reversed(range(count)):  # if this ends early, `_count` still finds the rest
                self.store.delete(self._key(which, name, rank, i))

    @staticmethod
    def _key(which: str, name: str, rank: int, i: int) -> str:
        return f"part/{which}.{name}.{rank}.{i}"
