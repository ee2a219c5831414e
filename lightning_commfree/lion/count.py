"""Counting ballots without unpacking them: 64 parameters a word, in carry-save adders.

A *plane* holds one bit of every parameter: int64 words, in any layout as long as all planes share
it. A list of planes is a number per parameter, in binary, least digit first. Everything here is
bitwise, so it does not depend on the byte order of the machine, and it runs where the planes are.
W: workers, B: words of a plane.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
    for place in range(max(len(digits), bound.bit_length()) - 1, -1, -1):
        digit = digits[place] if place < len(digits) else greater & 0
        if bound >> place & 1:
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
    for place in range(max(len(a), len(b))):
        digit_a = a[place] if place < len(a) else zero
        digit_b = b[place] if place < len(b) else zero
        total, carry = _full_adder(digit_a, digit_b, carry)
        digits.append(total)
    return [*digits, carry]


def _full_adder(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    differ = a ^ b
    return differ ^ c, (a & b) | (differ & c)
