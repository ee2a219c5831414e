"""Where ranks that train apart meet for Lightning's collectives, and what to do if some do not.

Lightning runs collectives after a step: for a checkpoint, a validation, at the end of an epoch. A
rank that comes to one asks first who else does (`comm.places`). Who comes to none any more has
ended its fit, or will wait for ranks whose next exchange it lacks; so the fit ends here for all.

Then the ranks may stand at different places of their last step. They meet again at the first one
that all of them come to. Until then each is alone: its collectives return what it put in, and a
checkpoint is written when the fit ends.
"""

from __future__ import annotations

from enum import IntEnum

from lightning_commfree.comm.places import Met, Places


class Stage(IntEnum):
    """Where in a step and in what follows it, in this order."""

    STEP = 0
    VALIDATION = 1
    EPOCH_END = 2
    FIT_END = 3


class Meeting:
    """One rank's way from place to place, from `begin` to `end`.

    Attributes:
        stage: where the rank is.
        stands: it has met the others since it came here.
    """

    def __init__(self) -> None:
        self.stage = Stage.STEP
        self.stands = False
        self._together_from = Stage.STEP
        self._places: Places | None = None

    @property
    def runs(self) -> bool:
        """Whether a fit trains."""
        return self._places is not None

    @property
    def alone(self) -> bool:
        """Whether the others do not come here."""
        return self.stage < self._together_from

    def begin(self, places: Places, step: int) -> None:
        """Train from now on; `step` steps are done."""
        self._places = places
        self.trained(step)

    def end(self) -> None:
        """Train no more."""
        self._places = None

    def trained(self, step: int) -> None:
        """Begin again, behind a step."""
        self._together_from = Stage.STEP
        self.enter(Stage.STEP)
        if self._places is not None:
            self._places.move(step)

    def enter(self, stage: Stage) -> None:
        """Come to the next stage."""
        self.stage, self.stands = stage, False

    def stand(self, ends: bool) -> Met:
        """Wait for the others; see `Places.stand`."""
        assert self._places is not None, "a fit trains"
        self.stands = True
        return self._places.stand(ends)

    def leave(self) -> None:
        """Come to no place any more, until the next step."""
        if self._places is not None:
            self._places.leave()

    def part(self, together_from: Stage) -> None:
        """Be alone until that stage: the fit has ended, at different stages."""
        self._together_from = together_from
