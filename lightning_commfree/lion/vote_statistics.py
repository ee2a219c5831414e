"""What the votes were like: figures for a log, counted on packed planes and only when asked for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_commfree.lion.bucket_vote import CastVote
from lightning_commfree.lion.vote import PackedDelta, compare_to


def vote_shares(votes: Iterable[CastVote]) -> dict[str, float]:
    """Return shares of the parameters, from 0 to 1.

    Args:
        votes: of one step, on all buckets.

    Returns:
        `ties`: Delta is 0. `zeros`: this worker's own vote is 0. `agreement`: Delta has the sign of
        this worker's vote, of the votes that are not 0.
    """
    parameters = moved = voted = alike = 0
    for valid, ballot, delta in votes:
        positive, negative = (plane & valid for plane in _signs(delta))
        minus = ballot.nonzero & ~ballot.plus

        parameters += _ones(valid)
        moved += _ones(positive | negative)
        voted += _ones(ballot.nonzero)
        alike += _ones((positive & ballot.plus) | (negative & minus))

    return {
        "ties": 1 - moved / max(parameters, 1),
        "zeros": 1 - voted / max(parameters, 1),
        "agreement": alike / max(voted, 1),
    }


def _signs(delta: PackedDelta) -> tuple[Tensor, Tensor]:
    """Return the planes of Delta > 0 and Delta < 0."""
    by_weight = dict(zip(delta.weights, delta.planes, strict=True))
    nothing = torch.zeros_like(delta.planes[0])
    digits = [by_weight.get(1 << i, nothing) for i in range(max(delta.weights).bit_length())]

    greater, equal = compare_to(digits, delta.offset)
    return greater, ~(greater | equal)


def _ones(plane: Tensor) -> int:
    """Return how many bits of a uint8 plane are set."""
    return int(_ONES[plane.int()].sum())


_ONES = torch.tensor([byte.bit_count() for byte in range(256)])
