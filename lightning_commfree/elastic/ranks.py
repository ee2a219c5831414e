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
    """One rank's channels to the other ranks of its replica; without channels, it is the only one.

    `decisions` is for the training thread, `messages` and `states` for the threads of the log that
    create them. All are in host memory, and connect the same ranks.
    """

    def __init__(
        self,
        decisions: Channel | None = None,
        messages: Channel | None = None,
        states: Channel | None = None,
    ) -> None:
        self._decisions = decisions or Channel([0], 0, Ledger())
        self._uploads = [messages or self._decisions, states or self._decisions]
        self.rank, self.size = self._decisions.rank, self._decisions.size

    def gather(self, value: int) -> list[int]:
        """Return the values of all ranks; collective, on the training thread."""
        return self._gather(self._decisions, value)

    def first(self, make: Callable[[], int]) -> int:
        """Return what `make` returns on rank 0, where it runs; collective like `gather`."""
        return self.gather(make() if self.rank == 0 else 0)[0]

    def meet(self) -> None:
        """Wait for the other ranks; collective, on the thread that creates messages."""
        self._gather_uploads(0, 0)

    def gather_for_state(self, value: int) -> list[int]:
        """Return the values of all ranks; collective, on the thread that creates states."""
        return self._gather_uploads(1, value)

    def _gather_uploads(self, which: int, value: int) -> list[int]:
        channel = self._uploads[which]
        if self.size > 1:
            channel.ledger.ignore_waits_of_this_thread()
        return self._gather(channel, value)

    def _gather(self, channel: Channel, value: int) -> list[int]:
        if self.size == 1:
            return [value]
        rows = channel.all_gather(torch.tensor([value], dtype=torch.int64), TAG).wait()
        values: list[int] = rows.flatten().tolist()
        return values

    def close(self) -> None:
        """Close the channels that are only for uploads."""
        for channel in self._uploads:
            if channel is not self._decisions:
                channel.close()
