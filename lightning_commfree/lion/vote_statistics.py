"""What the votes were like: figures for a log, counted on packed planes and only when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_commfree.lion.ballot_exchange import Ballot
from lightning_commfree.lion.count import compare_to
from lightning_commfree.lion.header import HeaderSummary
from lightning_commfree.lion.vote import PackedDelta


@dataclass
class VoteStatistics:
    """The votes of the last step, and what has piled up since the beginning.

    Attributes:
        abstentions: buckets that some worker has left to the others because of NaN or Inf, each
            worker counted, since the beginning.
    """

    abstentions: int = 0
    _votes: list[tuple[Tensor, Ballot, PackedDelta]] = field(default_factory=list, repr=False)

    def begin_step(self) -> None:
        """Forget the votes of the step before."""
        self._votes.clear()

    def count(
        self, valid: Tensor, ballot: Ballot, summary: HeaderSummary, packed_delta: PackedDelta
    ) -> None:
        """Take note of one bucket's vote; `valid` as in `cheaper_ballot_exchange`."""
        self.abstentions += len(summary.abstaining)
        self._votes.append((valid, ballot, packed_delta))

    def shares(self) -> dict[str, float]:
        """Return shares of the parameters, from 0 to 1, at the last step.

        `ties`: Delta is 0. `zeros`: this worker's own vote is 0. `agreement`: Delta has the sign of
        this worker's vote, of those that are not 0.
        """
        places = moved = voted = alike = 0
        for valid, ballot, packed_delta in self._votes:
            positive, negative = (plane & valid for plane in _signs(packed_delta))
            minus = ballot.nonzero & ~ballot.plus
            places += _ones(valid)
            moved += _ones(positive | negative)
            voted += _ones(ballot.nonzero)
            alike += _ones((positive & ballot.plus) | (negative & minus))
        return {
            "ties": 1 - moved / max(places, 1),
            "zeros": 1 - voted / max(places, 1),
            "agreement": alike / max(voted, 1),
        }


def _signs(packed_delta: PackedDelta) -> tuple[Tensor, Tensor]:
    """Return the planes of Delta > 0 and Delta < 0."""
    by_weight = dict(zip(packed_delta.weights, packed_delta.planes, strict=True))
    nothing = torch.zeros_like(packed_delta.planes[0])
    places = max(packed_delta.weights).bit_length()
    digits = [by_weight.get(1 << place, nothing) for place in range(places)]
    greater, equal = compare_to(digits, packed_delta.offset)
    return greater, ~(greater | equal)


def _ones(plane: Tensor) -> int:
    """Return how many bits of a uint8 plane are set."""
    return int(_ONES[plane.int()].sum())


_ONES = torch.tensor([byte.bit_count() for byte in range(256)])
