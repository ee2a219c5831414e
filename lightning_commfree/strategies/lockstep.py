"""Fits whose ranks exchange something in every optimizer step, and hold the same weights after it.

The exchange carries two flags of each rank: it wants all to stop (`Stopping.wanted`), and its
stream of unknown length ends with this step (`Stopping.stream_ends`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_commfree.strategies.contracts import EveryStep
from lightning_commfree.strategies.fit_session import FitSession
from lightning_commfree.strategies.signals import stopped_by_hand


class LockstepSession(FitSession[EveryStep]):
    """Sends the flags with the exchange of a step; averages buffers before anything reads them."""

    @override
    def begin(self, resumed: bool) -> None:
        stopping = self._stopping
        self.between.follow_parameters()
        self.between.send_flags(lambda: stopping.wanted, lambda: stopping.stream_ends)
        super().begin(resumed)

    @override
    def batch_begins(self) -> None:
        # a stream may end with a batch in which no optimizer steps, so no vote can say it
        channel = self._world if self.clock.spans_batch else self._channels.within
        self._stopping.share_last_batch(channel)

    @override
    def after_step(self) -> None:
        if self.between.stream_ended:
            self._stopping.end_epoch()

    @override
    def validation_begins(self) -> None:
        super().validation_begins()
        self.between.average_buffers()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if not stopped_by_hand(self._module):
            self.between.average_buffers()
        return read()

    @override
    def fit_ends(self) -> None:
        self.between.average_buffers()
