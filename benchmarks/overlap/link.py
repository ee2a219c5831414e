"""A channel with a simulated link, to measure overlap without sockets and their CPU time."""

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
    """Duration of a transfer: `latency_s` plus `seconds_per_byte` times its payload."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return the duration of a transfer."""
        return self.latency_s + self.seconds_per_byte * num_bytes


NO_TIME = Link()


def link_for(
    share: float, compute_s: float, transfers: int, num_bytes: int, latency_s: float
) -> Link:
    """Return the link over which a synchronous step spends `share` of its time waiting.

    Args:
        share: of the step, 0 to 1.
        compute_s: seconds of the step without communication.
        transfers: number of transfers in the step.
        num_bytes: total payload of the transfers.
        latency_s: of each transfer.

    Raises:
        ValueError: the latencies alone exceed the share.
    """
    wanted_s = compute_s * share / (1 - share)
    left_s = wanted_s - transfers * latency_s
    if left_s < 0:
        raise ValueError(
            f"{transfers} transfers of `latency_s={latency_s}` take longer than the {wanted_s:.4f}"
            f" s that are {share:.0%} of the step. Use a lower latency or a larger model."
        )
    return Link(latency_s, left_s / num_bytes)


class SleepingChannel(Channel):
    """Channel of one rank in a group without other ranks, which sleeps instead of transmitting.

    Transfers use the link one after the other and take no CPU. Results are this rank's own values:
    an all-reduce returns its input.

    Args:
        size: simulated number of ranks.
        ledger: as in `Channel`; counts the payload.
        now: clock in seconds.
        sleep: waits on this clock.

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
        self._free_at = 0.0  # end of the last transfer

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Return `tensor` after its transfer time."""
        return self._send(tensor, tensor.nbytes, tag)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Return `size` copies of `tensor` after their transfer time."""
        copies = torch.stack([tensor] * self.size)
        return self._send(copies, tensor.nbytes, tag)

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Raise: tensor parallelism does not use it."""
        raise NotImplementedError("tensor parallelism has no all-to-all")

    def broadcast(self, tensor: Tensor, tag: str, source: int = 0) -> Pending[Tensor]:
        """Raise: tensor parallelism does not use it."""
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
