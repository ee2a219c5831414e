"""Check that all ranks end an epoch after the same step.

A rank that ends its epoch early would wait for ranks that wait for its next exchange. Equal epochs
are agreed on in advance where that is possible (`strategies.stopping`). It is not for streams of
ranks that train apart, nor where a loader yields fewer batches than its length says, or a hook ends
the epoch on some ranks only. So every rank publishes its position with its heartbeats
(`comm.liveness`):

1. Rank 1's epoch ends after step 5. It waits there, and reads the other ranks' positions.
2. It reads that rank 0 has begun step 6. It announces an error that names both, and raises it.
3. The other ranks read the error with their next heartbeat and raise it: where they wait for an
   exchange, or at their next step.

With liveness off, or without a TCPStore, nothing is compared. Epochs of different length then end
in an error that names no rank, or only the exchange that failed, at the latest after the `timeout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_commfree.comm.liveness import PeerWatch

# A position is (epoch, steps begun, state). It is certain when it is published, and only advances:
# so an old one is still true.
_TRAINS = "trains"
_HAS_MORE = "has more"  # the rank is after that step, and its data have not ended
_ENDED = "ended"


class EpochEnds:
    """One rank's position, and its view of the other ranks' positions.

    Args:
        watch: watch of the channel to all ranks.
    """

    def __init__(self, watch: PeerWatch) -> None:
        self._watch = watch
        self._position = (-1, 0, _TRAINS)
        watch.publish(lambda: self._position)

    def step_begins(self, epoch: int, step: int) -> None:
        """Publish that this rank has begun a step.

        Raises:
            AgreedError: some rank's epoch ended before this step; another rank detected it.
        """
        self._position = (epoch, step, _TRAINS)
        self._watch.check("step")

    def has_more(self, epoch: int, step: int) -> None:
        """Publish that this rank's data continue after a step; a validation may come first."""
        self._position = (epoch, step, _HAS_MORE)

    def end(self, epoch: int, step: int, out_of_data: bool = False) -> None:
        """Wait until all ranks have ended this epoch after this step.

        Args:
            epoch: counted from 0.
            step: steps of the fit so far.
            out_of_data: this rank has run out of data, so all ranks must have.

        Raises:
            AgreedError: some rank ends it after another step.
            PeerLostError: some rank is lost, or has not ended it within the timeout.
        """
        self._position = (epoch, step, _ENDED)
        mine = self._watch.rank

        def behind(positions: Mapping[int, Any]) -> dict[int, str]:
            found = {}
            for rank, position in positions.items():
                there, at, state = position or (-1, 0, _TRAINS)  # it has not published any yet
                if there == epoch and at > step:
                    raise self._watch.agreed(_uneven(mine, rank, epoch, step, f"begun step {at}"))
                if there == epoch and out_of_data and (at, state) == (step, _HAS_MORE):
                    raise self._watch.agreed(_uneven(mine, rank, epoch, step, "more"))
                if there < epoch or (there == epoch and (at, state) != (step, _ENDED)):
                    found[rank] = (
                        f"has not come to the end of epoch {epoch}, which ended on rank {mine}"
                        f" after step {step}: it is slow or hangs; if it was only slow, make"
                        " `timeout` longer"
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
