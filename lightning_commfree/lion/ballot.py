"""What a worker sends up of one bucket: a header, then its votes as bits.

The header is two words and a byte for each parameter. The first word holds flags and the number of
zeros. The second word holds hashes of what must be equal on all workers: of the hyperparameters in
its upper half, of the parameters in its lower. Every worker sees all headers, so all of them decide
alike.

A vote is two bits in two planes, c > 0 and c != 0. The second plane travels only where there are
zeros. While they are few, a list of their indices takes its place.
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


class Ballot(NamedTuple):
    """What one worker votes on the parameters of one bucket; on the channel's device."""

    header: Tensor  # (header_bytes(parameters),), uint8
    plus: Tensor  # (B,), uint8: c > 0, padding 0
    nonzero: Tensor  # (B,), uint8: c != 0, padding 0


class HeaderSummary(NamedTuple):
    """What all headers say together; the same on all workers."""

    stop: bool  # somebody wants all to stop
    ends: tuple[bool, ...]  # by reason: somebody's part ends with this step by it; first: goes on
    zeros: int  # the most votes of 0 of a worker that does not abstain
    abstaining: tuple[int, ...]  # workers
    faults: tuple[tuple[int, int], ...]  # worker, parameter of the bucket: NaN or Inf
    with_gradient: tuple[bool, ...]  # per parameter: some worker has a gradient
    parameters_differ: bool
    hyperparameters_differ: bool

    def refuses(self, faults: bool) -> bool:
        """Return whether nothing may be done by this vote; `faults`: nor where there are some."""
        differ = self.parameters_differ or self.hyperparameters_differ
        return differ or (faults and bool(self.faults))


# -- the header


def header_bytes(parameters: int) -> int:
    """Return the size of a header: two words, then a byte per parameter, in whole words."""
    return _WORDS_BYTES + -(-parameters // 8) * 8


def join_digests(hyperparameters: int, parameters: Tensor | int) -> Tensor | int:
    """Return a header's word of what must be equal on all workers; int64 like `parameters`."""
    # the sign bit stays free: torch has no unsigned words
    upper = (hyperparameters % (1 << (_DIGEST_BITS - 1))) << _DIGEST_BITS
    return (parameters & ((1 << _DIGEST_BITS) - 1)) | upper


def write_header(
    out: Tensor, flags: int, zeros: Tensor, abstains: Tensor, digest: Tensor | int, marks: Tensor
) -> None:
    """Fill a header without reading anything back from its device.

    Args:
        out: uint8, shape (header_bytes(parameters),).
        flags: what this worker says for itself: `STOP`, `ENDS` times a reason, their sum, or 0.
        zeros: int64, no dimension: how many of its votes are 0.
        abstains: bool, no dimension: it leaves the whole bucket to the others.
        digest: as `join_digests` makes it, int64; 0: not asked for.
        marks: uint8, shape (parameters,): `HAS_GRADIENT` and `NONFINITE`.
    """
    words = out[:_WORDS_BYTES].view(torch.int64)
    words[0] = flags + abstains * _ABSTAINS + (zeros << _COUNT_FROM)
    words[1] = digest

    out[_WORDS_BYTES:].zero_()
    out[_WORDS_BYTES : _WORDS_BYTES + marks.numel()] = marks


def summarize_headers(headers: Tensor, parameters: int) -> HeaderSummary:
    """Put all workers' headers together; uint8, shape (workers, bytes)."""
    words = [[int(w) for w in row[:_WORDS_BYTES].view(torch.int64)] for row in headers]
    marks = headers[:, _WORDS_BYTES : _WORDS_BYTES + parameters]

    abstaining = tuple(w for w, (flags, _) in enumerate(words) if flags & _ABSTAINS)
    reasons = {flags // ENDS % REASONS for flags, _ in words}
    parameters_differ, hyperparameters_differ = differing([digest for _, digest in words])

    return HeaderSummary(
        stop=any(flags & STOP for flags, _ in words),
        ends=tuple(reason in reasons for reason in range(REASONS)),
        zeros=max([flags >> _COUNT_FROM for flags, _ in words if not flags & _ABSTAINS] or [0]),
        abstaining=abstaining,
        faults=tuple((int(w), int(p)) for w, p in (marks & NONFINITE).nonzero()),
        with_gradient=tuple((marks & HAS_GRADIENT).bool().any(0).tolist()),
        parameters_differ=parameters_differ,
        hyperparameters_differ=hyperparameters_differ,
    )


def digest_of(header: Tensor) -> Tensor:
    """Return the bytes of what must be equal on all workers: uint8, shape (DIGEST_BYTES,)."""
    return header[_WORDS_BYTES - DIGEST_BYTES : _WORDS_BYTES]


def differing(digests: Collection[int]) -> tuple[bool, bool]:
    """Return whether parameters differ, and whether hyperparameters do, by their digests."""
    of_parameters = {digest % (1 << _DIGEST_BITS) for digest in digests}
    of_hyperparameters = {digest >> _DIGEST_BITS for digest in digests}
    return len(of_parameters) > 1, len(of_hyperparameters) > 1


# -- the zeros as a list


def zero_indices_bytes(most: int) -> int:
    """Return the size of a list of up to `most` indices."""
    return 4 * most


def zero_indices(nonzero: Tensor, valid: Tensor, most: int) -> Tensor:
    """Return the indices of a worker's zeros.

    Args:
        nonzero: this worker's plane, uint8, shape (B,).
        valid: the bits that are no padding, uint8, shape (B,).
        most: length of the list, the same on all workers. The list of a worker with more zeros is
            cut off: that worker abstains, and nobody reads its list.

    Returns:
        int32, shape (most,): bit b of byte i has the index i + b B; -1 fills up.
    """
    zero = nonzero ^ valid
    (touched,) = zero.nonzero(as_tuple=True)
    bits = (zero[touched].unsqueeze(1) >> torch.arange(8, device=zero.device)) & 1
    row, bit = bits.nonzero(as_tuple=True)

    found = (touched[row] + valid.numel() * bit)[:most]
    padded = torch.full((most,), -1, dtype=torch.int32, device=zero.device)
    padded[: found.numel()] = found
    return padded


def nonzero_plane(indices: Tensor, valid: Tensor) -> Tensor:
    """Return the plane of c != 0 that `zero_indices` has made a list of: uint8, shape (B,)."""
    num_bytes = valid.numel()
    known = indices[indices >= 0].long()
    flags = (1 << known // num_bytes).to(torch.uint8)

    # indices differ, so the bits of one byte add up as they would be or-ed
    zero = torch.zeros_like(valid).index_put_((known % num_bytes,), flags, accumulate=True)
    return valid ^ zero
