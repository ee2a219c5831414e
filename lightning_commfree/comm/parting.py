"""Who ends a common training, by what and after which step: told to all, and put into words.

1. The data of rank 1 end with step 5. Ranks 0 and 2 would go on; all learn of it in an exchange.
2. They tell each other what became of their parts, four numbers each.
3. All have the same sentence: "The data of rank 1 ended after step 5, and ranks 0, 2 would have
   gone on".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.meeting import Stage

TAG = "end"
_SHOWN = 20  # ranks in a message


class Why(IntEnum):
    """By what a rank's part ends."""

    GOES_ON = 0  # it does not
    DATA = 1
    WILL = 2
    MAX_STEPS = 3
    APART = 4  # it would go on, from a place to which the others do not come

    @property
    def would_go_on(self) -> bool:
        """Whether it ends on account of the others."""
        return self in (Why.GOES_ON, Why.APART)


_SAID = {
    Why.DATA: "The data of {ranks} ended",
    Why.WILL: "{ranks} wanted to stop (`trainer.should_stop`)",
    Why.MAX_STEPS: "{ranks} reached `max_steps`",
    Why.APART: "{ranks} waited at the end of an epoch, a validation or a checkpoint",
}


class Part(NamedTuple):
    """What became of a rank's part."""

    why: Why
    step: int  # after which
    stage: Stage  # of its last step
    refuses: bool  # it may not end there


class Parted(NamedTuple):
    """What became of all; the same on all ranks."""

    said: str  # empty where all end alike
    refused: bool  # by some rank
    stage: Stage  # the first one to which all ranks come


def part(world: Channel, mine: Part) -> Parted:
    """Tell all ranks of `world` what became of this one's part; collective."""
    rows = world.all_gather(torch.tensor(mine, device=world.device), TAG).wait().tolist()
    parts = [Part(Why(why), step, Stage(at), bool(refuses)) for why, step, at, refuses in rows]
    alike = not any(one.why.would_go_on for one in parts) and len({one.step for one in parts}) == 1
    return Parted(
        "" if alike else _sentence(parts),
        any(one.refuses for one in parts),
        max(one.stage for one in parts),
    )


def _sentence(parts: Sequence[Part]) -> str:
    """Return what became of all, `parts` by rank; without a full stop."""
    ranks = defaultdict(list)
    for rank, one in enumerate(parts):
        ranks[one.step, one.why].append(rank)
    said = "; ".join(
        f"{_SAID[why].format(ranks=_named(some))} after step {step}"
        for (step, why), some in sorted(ranks.items())
        if why != Why.GOES_ON
    )
    others = [rank for rank, one in enumerate(parts) if one.why == Why.GOES_ON]
    return f"{said}, and {_named(others)} would have gone on" if others else said


def _named(ranks: Sequence[int]) -> str:
    """Return them for a message: "rank 1", "ranks 1, 2"."""
    names = ", ".join(map(str, ranks[:_SHOWN])) + (" and others" if len(ranks) > _SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}"
