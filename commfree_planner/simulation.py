"""Simulate one replica's steps until a cycle repeats (arXiv:2501.18512).

A step is a graph with these nodes for layers 0 ... L-1. The machine computes one node at a time,
and the link transmits one message at a time, in order:

- *forward* of layer l, after that of layer l-1 and after every message that layer l waits for;
- *activation gradient* of layer l, after that of layer l+1; then its *parameter gradient*;
- *exchange* of a message, after the parameter gradient of the layer with which it leaves.

Forward, activation gradient and parameter gradient of a layer take a third of its time each. All
replicas behave the same, so simulating one is enough.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commfree_planner.layer_sums import LayerSums
from commfree_planner.tcp import window_seconds

_MOST_CYCLES = 100
_SAME = 1e-9  # of a step; smaller differences are rounding


class Message(NamedTuple):
    """A message that one replica sends once per cycle."""

    leaves_after: int  # the layer after whose parameter gradient it leaves
    needed_by: int  # the layer whose forward waits for it
    num_bytes: float
    rounds: int = 0  # number of latencies until all of it has arrived
    connections: int = 1  # on which the replica sends it
    phases: int = 1  # parts of equal size; each starts when all replicas have the one before it
    # Bytes for which the link is busy; None: `num_bytes`, as it receives while it sends. Through a
    # store it reads afterwards, and the store's link carries those of all replicas.
    moved_bytes: float | None = None

    @property
    def link_bytes(self) -> float:
        """Bytes for which the link is busy."""
        return self.num_bytes if self.moved_bytes is None else self.moved_bytes


@dataclass(frozen=True)
class Exchange:
    """The messages of a cycle, and when they leave and land.

    Args:
        sync_every: H, inner steps of a cycle.
        overlap_steps: tau; the forward of step t + tau + 1 waits for a message that leaves in
            step t.
        fragments: messages of each of the P fragments; fragment p leaves floor(p H / P) steps into
            the cycle.
        sync_seconds: time per cycle in which the replica neither computes nor waits for the link,
            because it encodes, decodes, or steps the outer optimizer.
    """

    sync_every: int
    overlap_steps: int
    fragments: tuple[tuple[Message, ...], ...]
    sync_seconds: float = 0.0

    def offset(self, fragment: int) -> int:
        """Return the step of the cycle in which a fragment leaves."""
        return fragment * self.sync_every // len(self.fragments)

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes that one replica sends in `sync_every` steps."""
        return sum(message.num_bytes for fragment in self.fragments for message in fragment)

    @property
    def link_bytes_per_cycle(self) -> float:
        """Bytes for which the link is busy in `sync_every` steps."""
        return sum(message.link_bytes for fragment in self.fragments for message in fragment)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that one replica sends per step, on average."""
        return self.bytes_per_cycle / self.sync_every

    @property
    def bytes_at_once(self) -> float:
        """Bytes of the largest fragment."""
        return max(sum(message.num_bytes for message in f) for f in self.fragments)


def utilization(
    layer_seconds: Sequence[float],
    exchange: Exchange | LayerSums,
    gbit_per_s: float,
    latency_s: float = 0.0,
    loss: float = 0.0,
    bbr: bool = False,
) -> float:
    """Return the share of time in which the machine computes, in the steady state.

    Args:
        layer_seconds: compute time of each layer in a step, forward and backward together.
        exchange: the messages.
        gbit_per_s: bandwidth of a replica's link, in 10^9 bits per second; may be infinite.
        latency_s: of the link, one way. Consecutive messages do not wait for each other's latency.
        loss: share of the packets that the link loses (`tcp`); without latency, it costs nothing.
            Not used for tensor parallelism.
        bbr: whether TCP's congestion control is BBR instead of CUBIC.

    Raises:
        ValueError: the bandwidth is not positive.
    """
    if not gbit_per_s > 0:
        raise ValueError(
            f"`bandwidth={gbit_per_s}` Gbit/s must be positive: without a link the replicas cannot"
            " sync. Pass what one replica can send, for example 1 for Gigabit Ethernet."
        )
    bytes_per_s = gbit_per_s * 1e9 / 8
    if isinstance(exchange, LayerSums):
        return exchange.utilization(layer_seconds, bytes_per_s, latency_s)
    replica = _Replica(layer_seconds, exchange, bytes_per_s, latency_s, loss, bbr)
    tolerance = _SAME * sum(layer_seconds)
    cycle_s, before = 0.0, replica.state()
    for _ in range(_MOST_CYCLES):
        cycle_s = replica.cycle()
        now = replica.state()
        if _equal(before, now, tolerance):
            break
        before = now
    # a link that is slightly too slow builds up a backlog for many cycles before the machine waits
    # for it; in the long run no cycle is shorter than its messages
    cycle_s = max(cycle_s, exchange.link_bytes_per_cycle / bytes_per_s) + exchange.sync_seconds
    return min(1.0, exchange.sync_every * sum(layer_seconds) / cycle_s)  # min: rounding


def log_grid(lowest: float, highest: float, points: int) -> list[float]:
    """Return `points` values from `lowest` to `highest`, inclusive, in equal ratios."""
    ratio = highest / lowest
    return [lowest * ratio ** (i / (points - 1)) for i in range(points)]


def needed_bandwidth(
    layer_seconds: Sequence[float],
    exchange: Exchange | LayerSums,
    target: float,
    grid: Sequence[float],
    latency_s: float = 0.0,
    loss: float = 0.0,
    bbr: bool = False,
) -> int:
    """Return the index of the first bandwidth of a grid that reaches a utilization.

    Args:
        layer_seconds: compute time of each layer in a step.
        exchange: the messages.
        target: the utilization, in (0, 1).
        grid: bandwidths in Gbit/s, ascending. Utilization does not decrease along it.
        latency_s: of the link, one way.
        loss: share of the packets that the link loses.
        bbr: whether TCP's congestion control is BBR instead of CUBIC.

    Returns:
        The index; `len(grid)` if no bandwidth reaches the target.

    Raises:
        ValueError: the target is outside (0, 1).
    """
    if not 0 < target < 1:
        raise ValueError(
            f"a target utilization of {target} is not strictly between 0 and 1: 1 needs an infinite"
            " bandwidth. Pass a share, for example 0.95."
        )

    def reached(gbit_per_s: float) -> float:
        return utilization(layer_seconds, exchange, gbit_per_s, latency_s, loss, bbr)

    return bisect_left(grid, target, key=reached)


class _Replica:
    """A replica with two clocks, in seconds: `_now` of the machine, `_link_free` of its link."""

    def __init__(
        self,
        layer_seconds: Sequence[float],
        exchange: Exchange,
        bytes_per_s: float,
        latency_s: float,
        loss: float,
        bbr: bool,
    ) -> None:
        self._forward_s = [seconds / 3 for seconds in layer_seconds]
        self._backward_s = [(layer, 2 * s / 3) for layer, s in enumerate(layer_seconds)][::-1]
        self._step_s = sum(layer_seconds)
        self._exchange = exchange
        self._bytes_per_s = bytes_per_s
        self._latency_s, self._loss = latency_s, 0.0 if bbr else loss
        # CUBIC starts again after a pause
        self._idle = exchange.sync_every > 1 and not bbr
        self._leaving = _by_step_and_layer(exchange)
        self._step = 0
        self._now = self._link_free = 0.0
        self._due: dict[int, dict[int, float]] = {}  # arrival times by step and layer

    def cycle(self) -> float:
        """Simulate `sync_every` steps; return their duration in seconds."""
        start = self._now
        for _ in range(self._exchange.sync_every):
            self._simulate_step()
        return self._now - start

    def state(self) -> tuple[float, ...]:
        """Return everything that determines the future, in seconds from now."""
        arrivals = [t for _, due in sorted(self._due.items()) for _, t in sorted(due.items())]
        return tuple(max(0.0, t - self._now) for t in [self._link_free, *arrivals])

    def _simulate_step(self) -> None:
        due = self._due.pop(self._step, {})
        leaving = self._leaving.get(self._step % self._exchange.sync_every, {})
        if due or leaving:
            self._forward(due)
            self._backward(leaving)
        else:
            self._now += self._step_s
        self._step += 1

    # the two loops take almost all of a plan's time

    def _forward(self, due: dict[int, float]) -> None:
        """Advance the clock by the forward pass; a layer waits for its message, `due` by layer."""
        now = self._now
        for layer, seconds in enumerate(self._forward_s):
            if layer in due and due[layer] > now:
                now = due[layer]
            now += seconds
        self._now = now

    def _backward(self, leaving: dict[int, list[Message]]) -> None:
        """Advance the clock by the backward pass; send the messages `leaving` after each layer."""
        now = self._now
        for layer, seconds in self._backward_s:
            now += seconds
            if layer in leaving:
                self._now = now
                for message in leaving[layer]:
                    self._send(message)
        self._now = now

    def _send(self, message: Message) -> None:
        """Put a message on the link, and record its arrival for the layer that needs it."""
        start = max(self._now, self._link_free)
        self._link_free = start + message.link_bytes / self._bytes_per_s
        due = self._due.setdefault(self._step + self._exchange.overlap_steps + 1, {})
        arrival = self._link_free
        if self._latency_s:
            arrival += message.rounds * self._latency_s
            arrival += message.phases * window_seconds(
                message.link_bytes / message.phases,
                self._bytes_per_s,
                self._latency_s,
                self._loss,
                message.connections,
                idle=self._idle,
            )
        due[message.needed_by] = max(arrival, due.get(message.needed_by, 0.0))


def _by_step_and_layer(exchange: Exchange) -> dict[int, dict[int, list[Message]]]:
    """Return the messages by step of the cycle, then by the layer after which they leave."""
    leaving: dict[int, dict[int, list[Message]]] = {}
    for p, fragment in enumerate(exchange.fragments):
        by_layer = leaving.setdefault(exchange.offset(p), defaultdict(list))
        for message in fragment:
            if message.link_bytes > 0:
                by_layer[message.leaves_after].append(message)
    return {step: by_layer for step, by_layer in leaving.items() if by_layer}


def _equal(a: tuple[float, ...], b: tuple[float, ...], tolerance: float) -> bool:
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=_SAME, abs_tol=tolerance) for x, y in zip(a, b, strict=True)
    )
