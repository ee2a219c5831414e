"""How votes are counted (arXiv:2404.00438, equation 4): two rules, on packed planes.

A worker's vote on a parameter is the sign of its direction: +1, -1, or 0 for an exact zero. With P
workers for plus, M for minus and n workers in all:

============ ============================== ====================================================
rule         Delta                          sent back for each parameter
============ ============================== ====================================================
majority     sign(P - M)                    1 bit; a second one where some sum in the shard is 0
average      (P - M) / n                    P in ceil(log2(n + 1)) bits; where some worker has a
                                            zero, P - M + n in ceil(log2(2 n + 1)) bits
============ ============================== ====================================================

Votes are counted without being unpacked, 64 parameters a word, in carry-save adders. A *plane*
holds one bit of every parameter: int64 words, in any layout as long as all planes share it. A list
of planes is a number per parameter, in binary, least digit first. Every operation is bitwise, so
nothing depends on the byte order of the machine, and all of it runs where the planes are.

W: workers, B: int64 words of a plane, D: planes of a result, N: parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_commfree.comm.bits import unpack_bits_part

Draw = Callable[[int, int], Tensor]  # which shard, how many words -> int64 words of random bits


class PackedDelta(NamedTuple):
    """Delta of every parameter, packed: the weighted sum of its bits, minus and over `offset`."""

    planes: Tensor  # (D, bytes), uint8; laid out as in `comm.bits`
    weights: tuple[int, ...]  # D of them
    offset: int  # 1 for a majority, n for an average

    def to(self, device: torch.device) -> PackedDelta:
        """Return the same on `device`."""
        return self._replace(planes=self.planes.to(device, non_blocking=True))

    def read(self, start: int, out: Tensor, workspace: Tensor | None = None) -> Tensor:
        """Write Delta of parameters `start` and following into `out`: floating point, shape (N,).

        Every operation rounds once, as in the formula: whole numbers, then one division.

        Args:
            start: which parameter is the first.
            out: what is written.
            workspace: uint8, shape (2, N) or more: where bits are put, to save the allocation.
        """
        size = out.numel()
        if workspace is None:
            workspace = torch.empty(2, size, dtype=torch.uint8, device=out.device)
        total, bits = (row[:size] for row in workspace)

        if 2 * self.offset > 127:  # the sum does not fit
            return self._read_wide(start, out, bits)
        for i, (plane, weight) in enumerate(zip(self.planes, self.weights, strict=True)):
            unpack_bits_part(plane, start, bits if i else total)
            if i:
                total.add_(bits, alpha=weight)
            elif weight > 1:
                total.mul_(weight)

        out.copy_(total.view(torch.int8).sub_(self.offset))
        return out if self.offset == 1 else self._divide(out)

    def _read_wide(self, start: int, out: Tensor, bits: Tensor) -> Tensor:
        total = torch.zeros(out.shape, dtype=torch.int32, device=out.device)
        for plane, weight in zip(self.planes, self.weights, strict=True):
            unpack_bits_part(plane, start, bits)
            total.add_(bits, alpha=weight)

        return self._divide(out.copy_(total.sub_(self.offset)))

    def _divide(self, out: Tensor) -> Tensor:
        # on a CUDA device a tensor over a Python number is a product with its rounded reciprocal
        return out.div_(torch.full((), self.offset, dtype=out.dtype, device=out.device))


class Shard(NamedTuple):
    """The result of counting some words."""

    planes: Tensor  # (D, B), int64: those that are always sent back
    weights: tuple[int, ...]
    rest: Tensor | None  # (B,), int64: one more of weight 1, sent back only if it is there


class Rule(Protocol):
    """How votes become Delta: `Majority` or `Average`."""

    def offset(self, workers: int) -> int:
        """Return `PackedDelta.offset`."""

    def count(
        self, plus_WB: Tensor, nonzero_WB: Tensor | None, valid_B: Tensor, shard: int
    ) -> Shard:
        """Count the ballots of some words.

        Args:
            plus_WB: int64, the bits of c > 0.
            nonzero_WB: int64, the bits of c != 0; None: no worker has a zero.
            valid_B: int64, set where there is a parameter and not padding.
            shard: which words of the bucket they are.
        """

    def weights(self, workers: int, zeros: bool) -> tuple[int, ...]:
        """Return the weights of all planes that a result can have."""

    def expected_planes(self, workers: int) -> int:
        """Return how many planes a shard sends back if no worker votes zero."""


class Majority:
    """Delta = sign(P - M).

    Args:
        draw: breaks ties: a parameter with as many votes for plus as for minus takes the drawn bit.
            One on which no worker votes never moves. None: ties do not move either.
    """

    def __init__(self, draw: Draw | None = None) -> None:
        self._draw = draw

    def offset(self, workers: int) -> int:
        """Return 1: the planes hold sign + 1."""
        del workers
        return 1

    def count(
        self, plus_WB: Tensor, nonzero_WB: Tensor | None, valid_B: Tensor, shard: int
    ) -> Shard:
        """Compare the numbers of votes for plus and minus."""
        workers = plus_WB.shape[0]
        plus = count_ones(plus_WB)

        if nonzero_WB is None:
            winners, ties = compare_to(plus, workers // 2)
            if workers % 2:  # half of the workers and a tie are two different things
                ties = torch.zeros_like(ties)
        else:
            winners, ties = compare(plus, count_ones(nonzero_WB & ~plus_WB))
        ties = ties & valid_B

        if self._draw is not None and ties.any():
            contested = ties if nonzero_WB is None else ties & _any_of(nonzero_WB)
            winners = winners | (contested & self._draw(shard, ties.numel()))
            ties = ties & ~contested

        return Shard(winners.unsqueeze(0), (2,), ties if ties.any() else None)

    def weights(self, workers: int, zeros: bool) -> tuple[int, ...]:
        """Return the weights of Delta > 0 and of Delta = 0: together sign + 1."""
        del workers, zeros
        return (2, 1)

    def expected_planes(self, workers: int) -> int:
        """Count a second plane for an even number of workers: they tie somewhere."""
        return 2 if workers % 2 == 0 and self._draw is None else 1


class Average:
    """Delta = (P - M) / n."""

    def offset(self, workers: int) -> int:
        """Return n: the planes hold P - M + n."""
        return workers

    def count(
        self, plus_WB: Tensor, nonzero_WB: Tensor | None, valid_B: Tensor, shard: int
    ) -> Shard:
        """Count the votes for plus; with zeros, P - M + n."""
        del valid_B, shard  # the result for padding is never read
        workers = plus_WB.shape[0]
        digits = count_ones(plus_WB)
        if nonzero_WB is not None:  # P - M + n = 2 P + (n - P - M)
            doubled = [torch.zeros_like(digits[0]), *digits]
            digits = add(doubled, count_ones(~nonzero_WB))

        weights = self.weights(workers, nonzero_WB is not None)
        return Shard(torch.stack(digits[: len(weights)]), weights, None)

    def weights(self, workers: int, zeros: bool) -> tuple[int, ...]:
        """Return the binary weights up to the largest possible sum."""
        lowest, most = (1, 2 * workers) if zeros else (2, workers)
        return tuple(lowest << i for i in range(most.bit_length()))

    def expected_planes(self, workers: int) -> int:
        """Return the digits of the sum."""
        return len(self.weights(workers, zeros=False))


def _any_of(flags_WB: Tensor) -> Tensor:
    result = flags_WB[0]
    for plane in flags_WB[1:]:
        result = result | plane
    return result


# -- counting


def count_ones(flags_WB: Tensor) -> list[Tensor]:
    """Count the set bits of every position.

    Args:
        flags_WB: int64, shape (W, B), a plane of each worker.

    Returns:
        The counts as floor(log2 W) + 1 planes of shape (B,).
    """
    digits: list[Tensor] = []
    waiting = list(flags_WB.unbind(0))  # planes of one weight that are still to be added
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

    return digits[: flags_WB.shape[0].bit_length()]  # the planes above it are zero


def compare_to(digits: Sequence[Tensor], bound: int) -> tuple[Tensor, Tensor]:
    """Compare every number with `bound`, at least 0; return the planes of greater and equal."""
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
    """Compare numbers of equally many digits; return the planes of a > b and of a == b."""
    greater, equal = a[0] & 0, ~(a[0] & 0)
    for digit_a, digit_b in zip(reversed(a), reversed(b), strict=True):
        greater = greater | (equal & digit_a & ~digit_b)
        equal = equal & ~(digit_a ^ digit_b)
    return greater, equal


def add(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Add numbers; the result has one digit more than the longer of both."""
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
