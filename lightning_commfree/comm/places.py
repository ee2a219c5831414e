"""Do all ranks come to where this one waits for them? Asked beside the exchanges.

Ranks that train apart meet now and then, in a validation or for a checkpoint. A rank whose epoch is
shorter comes to such a place after a step after which the others do not, and would wait there for
ranks that wait for its next exchange. So before it waits it *stands*, and asks:

1. Rank 0 stands after step 10 and asks rank 1, which is at step 9; so rank 0 asks again.
2. Rank 1 comes to step 10. If it stands there too, both find so, and meet. If it trains on, rank 0
   finds it at step 11: they do not meet here.

With its place a rank tells whether its part ends there, so that all who meet know it of all.

Who finds that all have come may be one place further on when another one asks for the first time
after, and not more, for there it waits for that one; so a rank tells the last two places.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_commfree.comm.peers import PeerWatch

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_TAG = "places"


class _Place(NamedTuple):
    step: int
    number: int  # of the places after this step, from 1
    ends: bool  # the rank's part, with it


class Met(NamedTuple):
    """What a rank finds at a place."""

    all_stand: bool
    ends: bool  # for some rank that stands here
    passed: bool = False  # not all stand, for some have trained on and none has left


class Places:
    """This rank's way past them; every rank of a channel has one.

    Args:
        watch: of the channel, whose timeout is how long the others are waited for; None for a
            single rank.
    """

    def __init__(self, watch: PeerWatch | None) -> None:
        self._watch = watch
        self._step = 0
        self._here = self._before = _Place(-1, 0, False)
        self._left = False

    def move(self, step: int) -> None:
        """Train on: `step` steps are done."""
        self._step, self._left = step, False
        self._tell()

    def leave(self) -> None:
        """Come to no further place: what this rank trains has ended."""
        self._left = True
        self._tell()

    def stand(self, ends: bool) -> Met:
        """Stand, and wait until every other rank stands here too, or cannot come any more.

        Args:
            ends: this rank's part ends here.

        Returns:
            What it finds. Where ranks cannot be asked, as if all stood here and said the same.

        Raises:
            RuntimeError: a rank is gone, or neither came nor passed within the time.
        """
        if self._watch is None:
            return Met(True, ends)
        number = self._here.number + 1 if self._here.step == self._step else 1
        self._before, self._here = self._here, _Place(self._step, number, ends)
        self._tell()
        end, pause = time.monotonic() + self._watch.seconds, _FIRST_PAUSE_S
        while (told := self._watch.told(_TAG)) is not None:
            here = [self._said_here(place) for place in told.values()]
            if None not in here:
                return Met(True, ends or any(here))
            elsewhere = {r: place for r, place in told.items() if self._said_here(place) is None}
            left = any(place.get("left", 0) for place in elsewhere.values())
            passed = any(place.get("step", 0) > self._step for place in elsewhere.values())
            if left or passed:
                return Met(False, ends, passed and not left)
            if time.monotonic() > end:
                found = "; ".join(
                    f"rank {rank} has done {place['step']} steps"
                    if "step" in place
                    else f"rank {rank} does not answer"
                    for rank, place in sorted(elsewhere.items())
                )
                raise RuntimeError(
                    f"This rank waits for all others after step {self._step}, and after"
                    f" {self._watch.seconds:.0f} s {found}. They are slow or hang; if they were"
                    " only slow, make `timeout` longer."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return Met(True, ends)

    def _said_here(self, told: Mapping[str, Any]) -> bool | None:
        """Return whether a rank's part ends here; None if it has not stood here.

        It may stand at a later place after the same step, or have gone on since.
        """
        for name in ("before", "here"):
            same_step = told.get(f"{name}_step") == self._here.step
            if same_step and told.get(f"{name}_number", 0) >= self._here.number:
                return bool(told.get(f"{name}_ends", 0))
        return None

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch.tell(
                step=self._step,
                here_step=self._here.step,
                here_number=self._here.number,
                here_ends=int(self._here.ends),
                before_step=self._before.step,
                before_number=self._before.number,
                before_ends=int(self._before.ends),
                left=int(self._left),
            )
