"""Abandon an exchange of an elastic job when one of its members hangs.

If a member's process exits, gloo reports an error within seconds. If the process is suspended or
its network is down, gloo waits for its own timeout. In all these cases, the member stops sending
heartbeats to the rendezvous, so this module checks how long ago the last one was sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from lightning_commfree.comm.liveness import PeerWatch, has_ended

# how often heartbeats are read during an exchange; a read takes about 1 kB
_READ_EVERY_S, _LEAST_PAUSE_S = 1.0, 0.1


class Heartbeats(Protocol):
    """Interface to the service that records when each replica last sent a heartbeat."""

    def heartbeats(self) -> Mapping[str, float]:
        """Return the seconds since each replica's last heartbeat, by replica name.

        Replicas that have sent no heartbeat are omitted.

        Raises:
            ConnectionError: the service does not respond.
        """


class MemberWatch(PeerWatch):
    """Waits for exchanges between the members of one view, and abandons them if a member hangs.

    Args:
        heartbeats: the rendezvous, which records the members' heartbeats.
        members: names of the replicas in the view, which take part in these exchanges.
        timeout_s: time without a heartbeat after which a member counts as hung.
    """

    def __init__(self, heartbeats: Heartbeats, members: Sequence[str], timeout_s: float) -> None:
        super().__init__()
        self._heartbeats, self._members, self._timeout_s = heartbeats, members, timeout_s

    @override
    def wait(self, works: Sequence[Any], tag: str) -> None:
        """Block until all collectives in `works` are complete.

        Raises:
            RuntimeError: a collective failed, or a member hangs. In the latter case, the message
                names the member.
        """
        due_s = time.monotonic() + _READ_EVERY_S
        while not all(map(has_ended, works)):
            if time.monotonic() > due_s:
                due_s = time.monotonic() + self._check(tag)

    def _check(self, tag: str) -> float:
        """Check the age of the members' heartbeats; return the seconds until the next check.

        That time is shorter if a member would otherwise exceed `timeout_s` before the next check.

        Raises:
            RuntimeError: a member hangs.
        """
        try:
            ages = self._heartbeats.heartbeats()
        except ConnectionError:
            return _READ_EVERY_S  # an unreachable rendezvous does not mean that a member hangs
        # a restarted rendezvous has not heard from all members yet
        ages = {name: ages[name] for name in self._members if name in ages}
        silent = {name: age for name, age in ages.items() if age > self._timeout_s}
        if silent:
            named = ", ".join(f"{name} ({age:.0f} s)" for name, age in silent.items())
            raise RuntimeError(
                f"The exchange '{tag}' was abandoned because these replicas stopped sending"
                f" heartbeats: {named}. They are hung, or their network is down."
            )
        left_s = self._timeout_s - max(ages.values(), default=0.0)
        return min(max(left_s, _LEAST_PAUSE_S), _READ_EVERY_S)
