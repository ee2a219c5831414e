"""Channels that wrap a real one to observe it or to inject faults."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending


class Wrapped:
    """A channel that delegates to a real one."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class Poison(Wrapped):
    """Fills a buffer with NaN while it is in flight, so that reading it before the wait shows.

    The sum comes about in a copy and is put into the buffer by `wait`.
    """

    _channel: Channel

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        flying = self._channel.all_reduce(tensor.clone(), tag)
        tensor.fill_(math.nan)
        return flying.then(tensor.copy_)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        sent = tensor.clone()
        flying = self._channel.all_gather(sent, tag)
        tensor.detach().fill_(math.nan)

        def resolve(gathered: Tensor) -> Tensor:
            tensor.detach().copy_(sent)
            return gathered

        return flying.then(resolve)


class Hasty(Wrapped):
    """Does not wait under one tag: a race, on purpose."""

    def __init__(self, channel: Any, tag: str) -> None:
        super().__init__(channel)
        self._tag = tag
        self._late: list[Pending[Tensor]] = []

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        flying: Pending[Tensor] = self._channel.all_reduce(tensor, tag)
        if tag != self._tag:
            return flying
        self._late.append(flying)
        return Pending.here(tensor)

    def catch_up(self) -> None:
        """Wait for the skipped all-reduces."""
        for flying in self._late:
            flying.wait()


class Deaf(Wrapped):
    """Skips the all-reduce under one tag, as if it had been forgotten."""

    def __init__(self, channel: Any, tag: str) -> None:
        super().__init__(channel)
        self._tag = tag

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        if tag == self._tag:
            return Pending.here(tensor)
        flying: Pending[Tensor] = self._channel.all_reduce(tensor, tag)
        return flying
