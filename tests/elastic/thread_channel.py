"""Channels between threads, which are the ranks of a replica."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import Ledger


class Meeting:
    """Where `size` threads meet, in the same order of calls."""

    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60.0)


class ThreadChannel(Channel):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        size = len(meeting.rows)
        self._meeting = meeting
        group: Any = None if size == 1 else object()
        super().__init__(range(size), rank, Ledger(), group)

    @override
    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        meeting = self._meeting
        meeting.rows[self.rank] = tensor.clone()
        meeting.barrier.wait()
        gathered = torch.stack(meeting.rows)
        meeting.barrier.wait()  # nobody writes before all have read
        return Pending.here(gathered)

    @override
    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        return Pending.here(self.all_gather(tensor, tag).wait().sum(0))

    @override
    def close(self, failed: bool = False) -> None:
        pass
