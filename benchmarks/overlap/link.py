"""A channel whose link only takes time: for what overlap does, apart from sockets and their CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import Ledger


@dataclass(frozen=True)
class Link:
    """How long a transfer takes: `latency_s` plus `seconds_per_byte` times its payload."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds that a transfer occupies the link."""
        return self.latency_s + self.seconds_per_byte * num_bytes


NO_TIME = Link()


def link_for(
    share: float, compute_s: float, transfers: int, num_bytes: int, latency_s: float
) -> Link:
    """Return the link over which a step that waits for every transfer waits for `share` of it.

    Args:
        share: of the step, 0 to 1.
        compute_s: seconds of the step without communication.
        transfers: of the step.
        num_bytes: payload of all of them.
        latency_s: of each.

    Raises:
        ValueError: the latencies alone take longer.
    """
    wanted_s = compute_s * share / (1 - share)
    left_s = wanted_s - transfers * latency_s
    if left_s < 0:
        raise ValueError(
            f"{transfers} transfers of `latency_s={latency_s}` take longer than the {wanted_s:.4f}"
            f" s that are {share:.0%} of the step. Choose a lower latency or a larger model."
        )
    return Link(latency_s, left_s / num_bytes)


class SleepingChannel(Channel):
    """One rank's end of a group whose other ranks do not exist.

    Transfers follow each other on one link, each as long as `link` says, and use no CPU. Values
    are this rank's own: sums come back as they went in.

    Args:
        size: ranks that the group pretends to have.
        ledger: as in `Channel`; what is counted is the payload.
        now: the clock, in seconds.
        sleep: lets so many seconds of that clock pass.

    Attributes:
        link: may be changed while nothing is in flight.
    """

    def __init__(
        self,
        size: int,
        ledger: Ledger,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__([0], 0, ledger)
        self._now, self._sleep = now, sleep
        self.ranks, self.size = tuple(range(size)), size
        self.link = NO_TIME
        self._free_at = 0.0  # when the link has done what it was given

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Return `tensor` when its time has passed."""
        return self._send(tensor, tensor.nbytes, tag)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Return `size` copies of `tensor` when their time has passed."""
        copies = torch.stack([tensor] * self.size)
        return self._send(copies, tensor.nbytes, tag)

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Not part of tensor parallelism."""
        raise NotImplementedError("tensor parallelism has no all-to-all")

    def broadcast(self, tensor: Tensor, tag: str, source: int = 0) -> Pending[Tensor]:
        """Not part of tensor parallelism."""
        raise NotImplementedError("tensor parallelism has no broadcast")

    def _send(self, result: Tensor, num_bytes: int, tag: str) -> Pending[Tensor]:
        self.ledger.count_sent(tag, num_bytes)
        arrival = max(self._now(), self._free_at) + self.link.seconds(num_bytes)
        self._free_at = arrival

        def resolve() -> Tensor:
            with self.ledger.count_wait(tag):
                while (left_s := arrival - self._now()) > 0:
                    self._sleep(left_s)
            return result

        return Pending(resolve)
