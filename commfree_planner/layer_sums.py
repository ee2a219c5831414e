"""All-reduces of activations in tensor parallelism, and their overlap in Domino (arXiv:2409.15241).

The ranks of a group hold shards of every layer. Each block has two all-reduces in forward and two
in backward, after attention and after the feed-forward layer. Tensor parallelism waits for each.
Domino splits the batch in two: while the all-reduce of half A is in flight, half B computes.

Let a be the compute time of a half between two all-reduces, and c the time of its all-reduce. Half
A continues after its all-reduce, and machine and link do one thing at a time, so a pair of halves
takes 2 max(a, c). The all-reduces of embedding and head are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SUMS_PER_DIRECTION = 2  # all-reduces of a block in forward, and in backward
_HALVES = 2
_FORWARD_SHARE = 1 / 3  # of the compute time of a step


@dataclass(frozen=True)
class LayerSums:
    """The all-reduces of one rank of a tensor-parallel group in a step.

    Args:
        num_blocks: of the model.
        bytes_per_sum: sent by a rank for one all-reduce over the whole batch.
        rounds: number of latencies of an all-reduce.
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
        """Bytes that one rank sends in a step, which is a cycle."""
        return self.bytes_per_cycle

    @property
    def bytes_at_once(self) -> float:
        """Bytes of one all-reduce, of half a batch."""
        return self.bytes_per_sum / _HALVES

    def utilization(
        self, layer_seconds: Sequence[float], bytes_per_s: float, latency_s: float
    ) -> float:
        """Return the share of time in which a rank computes.

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
                # layer 0, outside of blocks, computes nothing and has no all-reduces
                slowest = max(half_s, sum_s) if seconds else 0.0
                taken += _SUMS_PER_DIRECTION * _HALVES * slowest
        return sum(layer_seconds) / taken
