"""Check that all ranks end an epoch after the same step.

A rank whose epoch ends early would deadlock: it would wait for the others at the end of the epoch
while they wait for its next exchange. `strategies.stopping` makes epochs equal in advance where it
can. That is impossible for streams, for a loader that yields fewer batches than its length, and for
a hook that ends the epoch on only some ranks. So every rank publishes its position with its
heartbeats (`comm.liveness`):

1. Rank 1's epoch ends after step 5. It waits and reads the other ranks' positions.
2. It finds that rank 0 has begun step 6, and raises an error that names both ranks and is sent to
   all.
3. The other ranks read that error with their next heartbeat and raise it, in the exchange for which
   they are waiting or at their next step.

With liveness off, or without a TCPStore, nothing is compared. An exchange then fails if epochs are
uneven, at the latest after the `timeout`, and its error names no rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_commfree.comm.liveness import PeerWatch

# A position is (epoch, steps begun, state). It only advances, so an old one is still valid.
_TRAINS = "trains"
_HAS_MORE = "has more"  # the rank is done with that step, and its data continue
_ENDED = "ended"


class EpochEnds:
    """Publish this rank's position in the epoch, and check the other ranks' positions."""

    def __init__(self, watch: PeerWatch) -> None:
        self._watch = watch
        self._position = (-1, 0, _TRAINS)
        watch.publish(lambda: self._position)

    def step_begins(self, epoch: int, step: int) -> None:
        """Publish that this rank has begun a step.

        Raises:
            AgreedError: another rank detected that a rank's epoch ended before this step.
        """
        self._position = (epoch, step, _TRAINS)
        self._watch.check("step")

    def has_more(self, epoch: int, step: int) -> None:
        """Publish that this rank has more data after a step; validation may run first."""
        self._position = (epoch, step, _HAS_MORE)

    def end(self, epoch: int, step: int, out_of_data: bool = False) -> None:
        """Wait until all ranks have ended this epoch after the same step.

        Args:
            epoch: counted from 0.
            step: number of steps in the fit so far.
            out_of_data: this rank has run out of data, so all ranks must have.

        Raises:
            AgreedError: a rank ends the epoch after a different step.
            PeerLostError: a rank is lost, or has not ended the epoch within the timeout.
        """
        self._position = (epoch, step, _ENDED)
        mine = self._watch.rank

        def behind(positions: Mapping[int, Any]) -> dict[int, str]:
            found = {}
            for rank, position in positions.items():
                there, at, state = position or (-1, 0, _TRAINS)  # not published yet
                if there == epoch and at > step:
                    raise self._watch.agreed(_uneven(mine, rank, epoch, step, f"begun step {at}"))
                if there == epoch and out_of_data and (at, state) == (step, _HAS_MORE):
                    raise self._watch.agreed(_uneven(mine, rank, epoch, step, "more"))
                if there < epoch or (there == epoch and (at, state) != (step, _ENDED)):
                    found[rank] = (
                        f"has not reached the end of epoch {epoch}, which ended on rank {mine}"
                        f" after step {step}: it is slow or hangs; if it is only slow, increase"
                        " `timeout`"
                    )
            return found

        self._watch.wait_for(behind, "end of epoch")


def _uneven(rank: int, other: int, epoch: int, step: int, more: str) -> str:
    return (
        f"The data of rank {rank} ended after step {step}, in epoch {epoch}, and rank {other} has"
        f" {more}. Either its loader had fewer batches, or a hook ended its epoch"
        " (`on_train_batch_start` returned -1). Give every rank the same number of batches:"
        " limit them with `limit_train_batches`."
    )
