"""Break an exchange of an elastic job when one of its members hangs.

gloo reports a process that has ended within seconds, but waits for its own timeout if the process
is stopped, or its network is down. Heartbeats to the rendezvous end in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from lightning_commfree.comm.liveness import PeerWatch, has_ended

_READ_EVERY_S = 1.0  # while an exchange is in progress: about 1 kB


class Heartbeats(Protocol):
    """Knows when replicas last sent a heartbeat."""

    def heartbeats(self) -> Mapping[str, float]:
        """Return the seconds since the last heartbeat of every replica it has heard from.

        Raises:
            ConnectionError: it does not answer.
        """


class MemberWatch(PeerWatch):
    """Wait for exchanges of one view, unless a member hangs.

    Args:
        heartbeats: the rendezvous.
        members: ids of the replicas in the view.
        timeout_s: of a heartbeat.
    """

    def __init__(self, heartbeats: Heartbeats, members: Sequence[str], timeout_s: float) -> None:
        super().__init__()
        self._heartbeats, self._members, self._timeout_s = heartbeats, members, timeout_s

    @override
    def wait(self, works: Sequence[Any], tag: str) -> None:
        """Block until all `works` are done.

        Raises:
            RuntimeError: one of them failed, or a member hangs; the message names it.
        """
        read_s = time.monotonic()
        while not all(map(has_ended, works)):
            if time.monotonic() - read_s > _READ_EVERY_S:
                self._check(tag)
                read_s = time.monotonic()

    def _check(self, tag: str) -> None:
        try:
            ages = self._heartbeats.heartbeats()
        except ConnectionError:
            return  # nothing is known while it is away
        # a rendezvous that was restarted has not heard from everybody yet
        silent = {name: ages[name] for name in self._members if name in ages}
        silent = {name: age for name, age in silent.items() if age > self._timeout_s}
        if silent:
            named = ", ".join(f"{name} ({age:.0f} s)" for name, age in silent.items())
            raise RuntimeError(
                f"The exchange '{tag}' was given up because these replicas stopped sending"
                f" heartbeats: {named}. They hang, or their network is down."
            )
