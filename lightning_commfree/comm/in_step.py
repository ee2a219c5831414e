"""Are all ranks at the same place? Each says where it is, and a word that the others have to know.

Ranks that share a model meet in every collective, so they must come to each of them together. A
rank whose data end earlier, or which alone has found NaN, would leave the others waiting, or meet
them in a collective of another kind. So where ranks may part, each tells the others first:

1. Ranks 0 and 1 are in batch 5, which is rank 1's last; rank 0 has more.
2. Both tell: rank 0 "in batch 5", rank 1 "in batch 5, my data end here".
3. Both know the same, so both decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from lightning_commfree.comm.channel import Channel

TAG = "in_step"
NUM_BYTES = 32  # of a word with its place


class Where(IntEnum):
    """What a rank has just done."""

    BATCH = 0  # got one
    BACKWARD = 1  # of it
    EPOCH = 2  # all that it has of it


class Place(NamedTuple):
    """Where a rank is in its fit."""

    where: Where
    epoch: int  # from 0
    batch: int  # of the epoch, from 0; -1: none yet

    def __str__(self) -> str:
        if self.where != Where.EPOCH:
            return f"in batch {self.batch} of epoch {self.epoch}"
        after = f", behind its batch {self.batch}" if self.batch >= 0 else ", without a batch"
        return f"at the end of epoch {self.epoch}{after}"


class Word(NamedTuple):
    """What a rank has to say there."""

    nonfinite: bool = False  # its gradients are not finite
    steps: bool = False  # an optimizer step follows; otherwise it accumulates
    stop: bool = False  # it wants all to stop after this step
    why: int = 0  # its part ends with this step; 0: it goes on

    def encode(self) -> int:
        """Return one whole number."""
        return self.nonfinite | self.steps << 1 | self.stop << 2 | self.why << 3

    @classmethod
    def decode(cls, code: int) -> Word:
        """Take apart what `encode` made."""
        return cls(bool(code & 1), bool(code & 2), bool(code & 4), code >> 3)


class InStep:
    """The words that ranks exchange: 32 bytes each, on the host.

    Args:
        channel: to the ranks that must stay together, of host memory. Nobody else may use it at a
            time that is not the same on all ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def tell(self, place: Place, word: Word) -> list[Word]:
        """Return the words of all ranks, by rank.

        Args:
            place: where this rank is.
            word: what the others have to know.

        Raises:
            RuntimeError: the ranks are at different places; on all of them alike.
        """
        mine = torch.tensor([*place, word.encode()], dtype=torch.int64)
        rows = self._channel.all_gather(mine, TAG).wait().tolist()
        places = [Place(Where(where), epoch, batch) for where, epoch, batch, _ in rows]
        if len(set(places)) > 1:
            ranks = self._channel.ranks
            found = [
                f"{_named([r for r, p in zip(ranks, places, strict=True) if p == one])} {one}"
                for one in sorted(set(places), key=lambda p: (p.epoch, p.batch, p.where))
            ]
            raise RuntimeError(
                f"The ranks of this fit have gone different ways: {'; '.join(found)}. Give all"
                " ranks equally many batches, and let all of them skip or stop at the same batch."
            )
        return [Word.decode(row[-1]) for row in rows]


def refuse_half_steps(words: Sequence[Word], step: int) -> None:
    """See that all ranks take an optimizer step now, or none of them.

    Args:
        words: of all ranks, by rank.
        step: optimizer steps done.

    Raises:
        RuntimeError: some would step and others accumulate; on all ranks alike.
    """
    stepping = [rank for rank, said in enumerate(words) if said.steps]
    if 0 < len(stepping) < len(words):
        raise RuntimeError(
            f"The data of the ranks {stepping} ended with a batch in the middle of accumulated"
            f" ones, after step {step}, and the other ranks would have gone on. Give all ranks"
            " equally many batches, as with `limit_train_batches`."
        )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} is" if len(ranks) == 1 else f"ranks {shown} are"
