"""Do all ranks stay where this one does? Asked beside the exchanges, and only by who wants to stay.

Ranks pass the same *crossings* in the same order, and at each one a rank may stay, which ends its
part. If all stay at the same crossing nothing has to be said. If one goes on, its next exchange
waits for the others, so they go on too and say in that exchange that they are leaving.

1. Rank 0 stays at crossing 7 and asks rank 1, which is on its way to it; so rank 0 asks again.
2. Rank 1 comes to crossing 7. If it wants to stay, both find so, and stay. If it passes by, rank 0
   finds so at its next question, and goes on.

Whether a rank stays is settled when it comes to a crossing, so all who want to stay there find the
same.
"""

from __future__ import annotations

import time

from lightning_commfree.comm.peers import PeerWatch

_AGAIN_S = 0.05
_TAG = "end"


class Crossings:
    """This rank's way past them; every rank of a channel has one.

    Args:
        watch: of the channel, whose timeout is how long the others are waited for; None for a
            single rank.
    """

    def __init__(self, watch: PeerWatch | None) -> None:
        self._watch = watch
        self._passed = 0
        self._tell(stays=False)

    def pass_by(self) -> None:
        """Go on at this crossing."""
        self._passed += 1
        self._tell(stays=False)

    def all_stay(self) -> bool:
        """Stay at this crossing if all others do; wait until each has come to it.

        Returns:
            Whether all stay. If not, this rank has passed by. False also where ranks cannot be
            asked.

        Raises:
            RuntimeError: a rank is gone, or did not come within the time.
        """
        if self._watch is None:
            return True
        self._tell(stays=True)
        end = time.monotonic() + self._watch.seconds
        while (told := self._watch.told(_TAG)) is not None:
            places = [place for place in told.values() if "left" not in place]
            if any(place.get("passed", 0) > self._passed for place in places):
                break
            here = {"passed": self._passed, "stays": 1}
            if all(place == here for place in places):
                return True
            if time.monotonic() > end:
                raise RuntimeError(
                    "This rank wants to end its training, and for"
                    f" {self._watch.seconds:.0f} s not all of the others have come as far or"
                    " answered. They are slow or hang; if they were only slow, make `timeout`"
                    " longer."
                )
            time.sleep(_AGAIN_S)
        self.pass_by()
        return False

    def _tell(self, stays: bool) -> None:
        if self._watch is not None:
            self._watch.tell(passed=self._passed, stays=int(stays))
