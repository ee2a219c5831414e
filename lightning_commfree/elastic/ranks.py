"""The ranks of one replica, which must take the same decisions at the same steps.

Each rank exchanges its own shards: it has its own access to the log (`elastic.log`), and reads and
writes its own part of every object. Which commit, state or slot to take, and which steps to skip,
is what rank 0 has found in the store.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger

TAG = "decisions"


class ReplicaRanks:
    """One rank's connections to the other ranks of its replica; by default, it is the only one.

    `decisions` is for the training thread, and `uploads` for the thread of the log that creates
    objects. Both are in host memory, and connect the same ranks.
    """

    def __init__(self, decisions: Channel | None = None, uploads: Channel | None = None) -> None:
        self._decisions = decisions or Channel([0], 0, Ledger())
        self._uploads = uploads or self._decisions
        self.rank, self.size = self._decisions.rank, self._decisions.size

    def gather(self, value: int) -> list[int]:
        """Return the values of all ranks; collective, on the training thread."""
        if self.size == 1:
            return [value]
        rows = self._decisions.all_gather(torch.tensor([value], dtype=torch.int64), TAG).wait()
        values: list[int] = rows.flatten().tolist()
        return values

    def first(self, make: Callable[[], int]) -> int:
        """Return what `make` returns on rank 0, where it runs; collective like `gather`."""
        return self.gather(make() if self.rank == 0 else 0)[0]

    def meet(self) -> None:
        """Wait for the other ranks; collective, on the thread that creates objects."""
        if self.size > 1:
            self._uploads.ledger.ignore_waits_of_this_thread()
            self._uploads.all_gather(torch.zeros(1, dtype=torch.uint8), TAG).wait()

    def close(self) -> None:
        """Close the channel that is only for uploads."""
        if self._uploads is not self._decisions:
            self._uploads.close()
