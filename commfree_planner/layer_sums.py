"""Tensor parallelism's sums of activations, and Domino's hiding of them (arXiv:2409.15241).

The ranks of a group hold a part of every layer. In each block two sums over the group are due in
forward and two in backward: of attention's output and of the feed-forward's. Tensor parallelism
waits for each. Domino cuts the batch in two: while the sum of half A travels, half B computes.

With a, the time in which a half computes what lies between two sums, and c, the time of its sum:
half A's next part needs A's sum, and machine and link do one thing at a time. So a pair of halves
takes 2 max(a, c). Sums of embedding and head are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SUMS_PER_DIRECTION = 2  # of a block, in forward and in backward
_HALVES = 2
_FORWARD_SHARE = 1 / 3  # of a step's computing; backward has the rest


@dataclass(frozen=True)
class LayerSums:
    """What one rank of a tensor parallel group sends in a step.

    Args:
        num_blocks: of the model.
        bytes_per_sum: that a rank sends for one sum over the whole batch.
        rounds: times that the link's latency is waited for in a sum.
    """

    num_blocks: int
    bytes_per_sum: float
    rounds: int

    sync_every = 1

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes that one rank sends in a step."""
        return 2 * _SUMS_PER_DIRECTION * self.num_blocks * self.bytes_per_sum

    @property
    def bytes_per_step(self) -> float:
        """The same."""
        return self.bytes_per_cycle

    @property
    def bytes_at_once(self) -> float:
        """Bytes of one sum."""
        return self.bytes_per_sum / _HALVES

    def utilization(
        self, layer_seconds: Sequence[float], bytes_per_s: float, latency_s: float
    ) -> float:
        """Return the share of the time in which a rank computes.

        Args:
            layer_seconds: compute time of each layer in a step, forward and backward together.
            bytes_per_s: of the link; may be infinite.
            latency_s: of the link, one way.
        """
        sum_s = self.bytes_per_sum / _HALVES / bytes_per_s + self.rounds * latency_s
        taken = 0.0
        for seconds in layer_seconds:
            for share in (_FORWARD_SHARE, 1 - _FORWARD_SHARE):
                half_s = seconds * share / _SUMS_PER_DIRECTION / _HALVES
                # a layer that computes nothing stands in no block and has no sums
                slowest = max(half_s, sum_s) if seconds else 0.0
                taken += _SUMS_PER_DIRECTION * _HALVES * slowest
        return sum(layer_seconds) / taken
