"""What goes before every ballot: two words and a byte for each parameter, so that all know alike.

The first word holds flags and the number of zeros; the second holds what must be equal on all
workers: a hash of the hyperparameters in its upper half, of the parameters in its lower.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

# Bits of a header's first word, below the number of zeros. A worker wants all to STOP; its own part
# ENDS with this step: that bit times the reason, a number below `REASONS`, 0 where it goes on.
STOP, _ABSTAINS, ENDS = 1, 2, 4
REASONS = 4
_COUNT_FROM = 8
HAS_GRADIENT, NONFINITE = 1, 2  # bits of a parameter's byte in a header
_WORDS_BYTES, DIGEST_BYTES = 16, 8
_DIGEST_BITS = 32  # of parameters; the upper half of a header's second word is of hyperparameters


class HeaderSummary(NamedTuple):
    """What all headers say together; the same on all workers."""

    stop: bool  # somebody wants all to stop
    ends: tuple[bool, ...]  # by reason: somebody's part ends with this step by it; first: goes on
    zeros: int  # the most votes of 0 of a worker that does not abstain
    abstaining: tuple[int, ...]  # workers
    faults: tuple[tuple[int, int], ...]  # worker, parameter of the bucket: NaN or Inf
    with_gradient: tuple[bool, ...]  # per parameter: some worker has a gradient
    drifted: bool  # the workers' parameters differ
    mistuned: bool  # their hyperparameters do

    def refuses(self, faults: bool) -> bool:
        """Return whether nothing may be done by this vote; `faults`: nor where there are some."""
        return self.drifted or self.mistuned or (faults and bool(self.faults))


def header_bytes(parameters: int) -> int:
    """Return the size of a header: two words, then a byte per parameter, in whole words."""
    return _WORDS_BYTES + -(-parameters // 8) * 8


def join_digests(hyperparameters: int, parameters: Tensor | int) -> Tensor | int:
    """Return a header's word of what must be equal on all workers; int64 like `parameters`."""
    # the sign bit stays free: torch has no unsigned words
    upper = (hyperparameters % (1 << (_DIGEST_BITS - 1))) << _DIGEST_BITS
    return (parameters & ((1 << _DIGEST_BITS) - 1)) | upper


def write_header(
    out: Tensor, wants: int, zeros: Tensor, abstains: Tensor, digest: Tensor | int, marks: Tensor
) -> None:
    """Fill a header without reading anything back from its device.

    Args:
        out: uint8, shape (header_bytes(parameters),).
        wants: what this worker says for itself: `STOP`, `ENDS` times a reason, their sum, or 0.
        zeros: int64, no dimension: on how many places it votes 0.
        abstains: bool, no dimension: it leaves the whole bucket to the others.
        digest: as `join_digests` makes it, int64; 0: not asked for.
        marks: uint8, shape (parameters,): `HAS_GRADIENT` and `NONFINITE`.
    """
    words = out[:_WORDS_BYTES].view(torch.int64)
    words[0] = wants + abstains * _ABSTAINS + (zeros << _COUNT_FROM)
    words[1] = digest
    out[_WORDS_BYTES:].zero_()
    out[_WORDS_BYTES : _WORDS_BYTES + marks.numel()] = marks


def summarize_headers(headers: Tensor, parameters: int) -> HeaderSummary:
    """Put all workers' headers together; uint8, shape (workers, bytes)."""
    words = [[int(w) for w in row[:_WORDS_BYTES].view(torch.int64)] for row in headers]
    marks = headers[:, _WORDS_BYTES : _WORDS_BYTES + parameters]
    abstaining = tuple(w for w, (flags, _) in enumerate(words) if flags & _ABSTAINS)
    drifted, mistuned = differing([digest for _, digest in words])
    reasons = {flags // ENDS % REASONS for flags, _ in words}
    return HeaderSummary(
        stop=any(flags & STOP for flags, _ in words),
        ends=tuple(reason in reasons for reason in range(REASONS)),
        zeros=max([flags >> _COUNT_FROM for flags, _ in words if not flags & _ABSTAINS] or [0]),
        abstaining=abstaining,
        faults=tuple((int(w), int(p)) for w, p in (marks & NONFINITE).nonzero()),
        with_gradient=tuple((marks & HAS_GRADIENT).bool().any(0).tolist()),
        drifted=drifted,
        mistuned=mistuned,
    )


def digest_of(header: Tensor) -> Tensor:
    """Return the bytes of what must be equal on all workers: uint8, shape (DIGEST_BYTES,)."""
    return header[_WORDS_BYTES - DIGEST_BYTES : _WORDS_BYTES]


def differing(digests: Collection[int]) -> tuple[bool, bool]:
    """Return whether parameters differ, and whether hyperparameters do, by their digests."""
    drifted = len({digest % (1 << _DIGEST_BITS) for digest in digests}) > 1
    return drifted, len({digest >> _DIGEST_BITS for digest in digests}) > 1
