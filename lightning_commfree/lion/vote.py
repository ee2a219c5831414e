"""Count votes in packed bit planes, by majority or average (arXiv:2404.00438, equation 4).

A worker's vote on a parameter is the sign of its direction: +1, -1, or 0 for an exact zero. With P
votes for plus, M votes for minus and n workers:

============ ============================== ====================================================
rule         Delta                          sent back for each parameter
============ ============================== ====================================================
majority     sign(P - M)                    1 bit; 2 bits if any sum in the bucket is 0
average      (P - M) / n                    P in ceil(log2(n + 1)) bits; if any worker has a
                                            zero, P - M + n in ceil(log2(2 n + 1)) bits
============ ============================== ====================================================

Votes are counted in packed form, 64 parameters per word, with carry-save adders. A *plane* contains
one bit per parameter, as int64 words. A list of planes represents one binary number per parameter,
least significant digit first. All operations are bitwise, so byte order does not matter.

Shapes: W workers, B int64 words per plane, D planes in a result, N parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.bits import unpack_bits_part

Draw = Callable[[int, int], Tensor]  # (shard index, number of words) -> int64 words of random bits


class PackedDelta(NamedTuple):
    """Delta, the result of a vote, as packed bit planes.

    A parameter's value is (weighted sum of its bits - `offset`) / `offset`.
    """

    planes: Tensor  # (D, bytes), uint8; in the layout of `comm.bits`
    weights: tuple[int, ...]  # one per plane
    offset: int  # 1 for a majority, n for an average

    def read(self, start: int, out: Tensor, factor: float = 1.0) -> Tensor:
        """Unpack Delta's values from index `start`, times `factor`, into `out`; return `out`.

        `out` is floating point, shape (N,). Only the division by `offset` and the multiplication by
        `factor`, in the dtype of `out`, are rounded.
        """
        bits = torch.empty(len(self.planes), out.numel(), dtype=torch.uint8, device=out.device)
        unpack_bits_part(self.planes, start, bits)
        # if sums are at most 127, their difference from the offset fits into int8
        total = bits[-1] if 2 * self.offset <= 127 else bits[-1].int()
        if self.weights[-1] > 1:
            total.mul_(self.weights[-1])
        for row, weight in zip(bits[:-1], self.weights[:-1], strict=True):
            total.add_(row, alpha=weight)

        signed = total.view(torch.int8) if total.dtype == torch.uint8 else total
        signed.sub_(self.offset)
        # Use tensors, because their dtype determines the result's. To divide by a number or a CPU
        # tensor, CUDA would multiply by its rounded reciprocal.
        if self.offset == 1:
            return torch.mul(signed, torch.full((), factor, dtype=out.dtype), out=out)
        divisor = torch.full((), self.offset, dtype=out.dtype, device=out.device)
        torch.div(signed, divisor, out=out)
        return out if factor == 1.0 else out.mul_(factor)


class CountedShard(NamedTuple):
    """Result of counting the votes on one shard of a bucket."""

    planes: Tensor  # (D, B), int64: always sent back
    weights: tuple[int, ...]
    ties: Tensor | None  # (B,), int64, weight 1: sent back only if a majority has ties


class Majority:
    """Majority rule: Delta = sign(P - M).

    With `draw`, random bits that workers share break ties, except where all votes are 0.
    Without it, a tie gives 0.
    """

    def __init__(self, draw: Draw | None = None) -> None:
        self._draw = draw

    def offset(self, num_workers: int) -> int:
        """Return `PackedDelta.offset`, which is 1 because the planes encode sign + 1."""
        del num_workers
        return 1

    def count(
        self,
        plus_WB: Tensor,  # int64: each worker's plane c > 0
        nonzero_WB: Tensor | None,  # int64: each worker's plane c != 0; None if no c is 0
        valid_B: Tensor,  # int64: bits that are not padding
        shard_index: int,  # in the bucket
    ) -> CountedShard:
        """Count the votes on one shard: a plane Delta > 0, and a plane of ties or None."""
        workers = plus_WB.shape[0]
        plus = count_ones(plus_WB)

        if nonzero_WB is None:
            winners, ties = compare_to(plus, workers // 2)
            if workers % 2:  # an odd number of nonzero votes cannot tie
                ties = torch.zeros_like(ties)
        else:
            winners, ties = compare(plus, count_ones(nonzero_WB & ~plus_WB))
        ties = ties & valid_B

        if self._draw is not None and ties.any():
            contested = ties if nonzero_WB is None else ties & _any_of(nonzero_WB)
            winners = winners | (contested & self._draw(shard_index, ties.numel()))
            ties = ties & ~contested

        return CountedShard(winners.unsqueeze(0), (2,), ties if ties.any() else None)

    def weights(self, num_workers: int, any_zeros: bool) -> tuple[int, ...]:
        """Return (2, 1): the weights of planes Delta > 0 and Delta = 0, which encode sign + 1."""
        del num_workers, any_zeros
        return (2, 1)

    def expected_planes(self, num_workers: int) -> int:
        """Return how many planes to expect in a result: 2 if ties are likely, else 1."""
        return 2 if num_workers % 2 == 0 and self._draw is None else 1


class Average:
    """Average rule: Delta = (P - M) / n."""

    def offset(self, num_workers: int) -> int:
        """Return n, the `PackedDelta.offset`: planes encode P - M + n (P votes are +, M are -)."""
        return num_workers

    def count(
        self, plus_WB: Tensor, nonzero_WB: Tensor | None, valid_B: Tensor, shard_index: int
    ) -> CountedShard:
        """Return P - M + n for one shard as planes; it equals 2 P if no worker votes zero."""
        del valid_B, shard_index  # the result for padding is never read
        workers = plus_WB.shape[0]
        digits = count_ones(plus_WB)
        if nonzero_WB is not None:  # P - M + n = 2 P + (n - P - M)
            doubled = [torch.zeros_like(digits[0]), *digits]
            digits = add(doubled, count_ones(~nonzero_WB))

        weights = self.weights(workers, nonzero_WB is not None)
        return CountedShard(torch.stack(digits[: len(weights)]), weights, None)

    def weights(self, num_workers: int, any_zeros: bool) -> tuple[int, ...]:
        """Return the planes' weights: the powers of two that the largest possible sum needs."""
        lowest, most = (1, 2 * num_workers) if any_zeros else (2, num_workers)
        return tuple(lowest << i for i in range(most.bit_length()))

    def expected_planes(self, num_workers: int) -> int:
        """Return the number of planes in a result, assuming that no worker votes zero."""
        return len(self.weights(num_workers, any_zeros=False))


Rule = Majority | Average


def _any_of(flags_WB: Tensor) -> Tensor:
    """Combine W planes with OR."""
    result = flags_WB[0]
    for plane in flags_WB[1:]:
        result = result | plane
    return result


# -- counting


def count_ones(flags_WB: Tensor) -> list[Tensor]:
    """Count the set bits at each position across W planes; return floor(log2 W) + 1 planes."""
    digits: list[Tensor] = []
    waiting = list(flags_WB.unbind(0))  # planes of the current weight that are not yet added
    while waiting:
        carries = []
        while len(waiting) >= 3:
            total, carry = _full_adder(waiting.pop(), waiting.pop(), waiting.pop())
            waiting.append(total)
            carries.append(carry)

        if len(waiting) == 2:
            first, second = waiting
            waiting = [first ^ second]
            carries.append(first & second)

        digits.append(waiting[0])
        waiting = carries

    return digits[: flags_WB.shape[0].bit_length()]  # higher planes are zero


def compare_to(digits: Sequence[Tensor], bound: int) -> tuple[Tensor, Tensor]:
    """Compare bit-sliced numbers with `bound`, 0 or more; return planes: greater than, equal to."""
    greater, equal = digits[0] & 0, ~(digits[0] & 0)

    for i in range(max(len(digits), bound.bit_length()) - 1, -1, -1):
        digit = digits[i] if i < len(digits) else greater & 0
        if bound >> i & 1:
            equal = equal & digit
        else:
            greater = greater | (equal & digit)
            equal = equal & ~digit

    return greater, equal


def compare(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compare bit-sliced numbers of equal width; return the planes a > b and a == b."""
    greater, equal = a[0] & 0, ~(a[0] & 0)
    for digit_a, digit_b in zip(reversed(a), reversed(b), strict=True):
        greater = greater | (equal & digit_a & ~digit_b)
        equal = equal & ~(digit_a ^ digit_b)
    return greater, equal


def add(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Add bit-sliced numbers; the result has one plane more than the longer operand."""
    zero = a[0] & 0
    carry, digits = zero, []

    for i in range(max(len(a), len(b))):
        digit_a = a[i] if i < len(a) else zero
        digit_b = b[i] if i < len(b) else zero
        total, carry = _full_adder(digit_a, digit_b, carry)
        digits.append(total)

    return [*digits, carry]


def _full_adder(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    differ = a ^ b
    return differ ^ c, (a & b) | (differ & c)
