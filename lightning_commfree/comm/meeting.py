"""Do all ranks come to where this one waits for them? Asked beside the exchanges.

Ranks meet now and then outside of their exchanges: at the end of a fit, in a validation, for a
checkpoint. A rank that comes there alone would wait for ranks that wait for its next exchange. So
it *stands* first, and asks the others where they are:

1. Rank 0 stands after step 10 and asks rank 1, which is at step 9; so rank 0 asks again.
2. Rank 1 comes to step 10. If it stands there too, both find so, and meet. If it goes on, rank 0
   finds it at step 11: they do not meet here.

A rank also tells whether its part ends where it stands, so that all who meet know it of all. Ranks
that go on ask nobody and send nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from lightning_commfree.comm.liveness import PeerWatch

TAG = "meeting"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Stage(IntEnum):
    """Where in a training step, and in what follows it, in this order."""

    STEP = 0
    VALIDATION = 1
    EPOCH_END = 2
    FIT_END = 3


class Met(NamedTuple):
    """What a rank finds where it stands."""

    all_stand: bool
    ends: bool  # the part of some rank that stands here
    passed: bool = False  # not all stand, for some have gone on and none has left


class _Place(NamedTuple):
    step: int
    number: int  # of the places after this step, from 1
    ends: bool  # the rank's part, with it


class Meeting:
    """One rank's way from step to step; every rank of a channel has one at a time.

    Ranks that do not meet at one stage of a step may still meet at a later one.

    Args:
        watch: of the channel, whose timeout is how long the others are waited for.
        unit: what messages call a step.

    Attributes:
        step: steps that this rank has done.
        stage: where it is since then.
        stands: it has stood since it came to that stage.
    """

    def __init__(self, watch: PeerWatch, unit: str = "step") -> None:
        self._watch, self._unit = watch, unit
        self.step = 0
        self._together_from = Stage.STEP
        # who finds that all have come may stand at its next place when another one asks for the
        # first time, and at no later one, for there it waits for that one: so two are told
        self._stood = [_Place(-1, 0, False), _Place(-1, 0, False)]
        self._leaves = False
        self.stage, self.stands = Stage.STEP, False
        watch.tell(self._words)

    @property
    def alone(self) -> bool:
        """Whether the others do not come to this stage."""
        return self.stage < self._together_from

    @property
    def can_ask(self) -> bool:
        """Whether this rank finds out where the others are; the same on all ranks."""
        return self._watch.can_ask

    def move(self, step: int) -> None:
        """Go on: `step` steps are done."""
        self._leaves = False  # first: who asks between finds this rank on its way, and asks again
        self.step, self._together_from = step, Stage.STEP
        self.enter(Stage.STEP)

    def enter(self, stage: Stage) -> None:
        """Come to a later stage."""
        self.stage, self.stands = stage, False

    def leave(self) -> None:
        """Stand nowhere any more before the next step."""
        self._leaves = True

    def part(self, together_from: Stage) -> None:
        """Be alone until that stage, the first one to which all ranks come."""
        self._together_from = together_from

    def stand(self, ends: bool = False) -> Met:
        """Stand, and wait until every other rank stands here too, or cannot come any more.

        Args:
            ends: this rank's part ends here.

        Returns:
            What it finds. Where ranks cannot be asked, as if all stood here and said the same.

        Raises:
            RuntimeError: a rank is gone, or neither came nor went on within the time.
        """
        self.stands = True
        last = self._stood[1]
        number = last.number + 1 if last.step == self.step else 1
        self._stood = [last, _Place(self.step, number, ends)]

        end, pause_s = time.monotonic() + self._watch.seconds, _FIRST_PAUSE_S
        while (told := self._watch.told(TAG)) is not None:
            said = {rank: self._said_here(words) for rank, words in told.items()}
            if None not in said.values():
                return Met(True, ends or any(said.values()))

            elsewhere = {rank: told[rank] for rank, ended in said.items() if ended is None}
            left = any("closed" in words or words.get("leaves") for words in elsewhere.values())
            passed = any(words.get("step", 0) > self.step for words in elsewhere.values())
            if left or passed:
                return Met(False, ends, passed and not left)

            if time.monotonic() > end:
                raise RuntimeError(self._in_vain(elsewhere))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return Met(True, ends)

    def _said_here(self, words: Mapping[str, Any]) -> bool | None:
        """Return whether a rank's part ends here; None if it has not stood here.

        It may stand at a later place after the same step, or have gone on since.
        """
        here = self._stood[1]
        for step, number, ends in words.get("stood", ()):
            if step == here.step and number >= here.number:
                return bool(ends)
        return None

    def _in_vain(self, elsewhere: Mapping[int, Mapping[str, Any]]) -> str:
        found = "; ".join(
            f"rank {rank} is at {self._unit} {words['step']}"
            if "step" in words
            else f"rank {rank} does not answer"
            for rank, words in sorted(elsewhere.items())
        )
        return (
            f"This rank waits for all others at {self._unit} {self.step}, and after"
            f" {self._watch.seconds:.0f} s {found}. They are slow or hang; if they were only slow,"
            " make `timeout` longer."
        )

    def _words(self) -> dict[str, Any]:
        """Return what others are told, in the thread that answers them."""
        return {"step": self.step, "stood": self._stood, "leaves": self._leaves}
