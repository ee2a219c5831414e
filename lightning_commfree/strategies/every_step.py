"""Ranks that exchange something in every optimizer step, and hold the same weights after it.

With the step's exchange a rank says why its part ends with that step, if it does: the data of its
epoch are used up, or it wants to stop. If that holds for some ranks and not for others, all take
the step, and end the fit after it.

`trainer.should_stop` is set later, in `on_train_batch_end` or after a validation, when the step's
exchange is over. A rank that has set it asks the others whether they stop at the same place
(`comm.meeting`). If they do, nothing changes; if not, or if ranks cannot be asked, it trains for
one step more and says so in that one.

What nobody can foresee is not covered: `dataloader_iter` in `training_step`, a loader that yields
fewer batches than its length, `on_train_batch_start` that returns -1 on some ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_commfree.comm.parting import Why
from lightning_commfree.lightning_internals import may_stop_early
from lightning_commfree.strategies.contracts import EveryStep
from lightning_commfree.strategies.ending import CommonEnd
from lightning_commfree.strategies.pace import Fit, Pace
from lightning_commfree.strategies.signals import stopped_by_hand


class LockstepEnd(CommonEnd):
    """The end of a fit whose ranks take every step together.

    Args:
        fit: that will end; the ends of Lightning's two training loops are patched.
        before_epoch_end: is called where a rank has no batch left.
    """

    def __init__(
        self, fit: Fit[Any], before_epoch_end: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(fit, "chance to stop")
        self._wants_to_stop = self._agreed = False
        self.meeting.move(0)

        loop = fit.trainer.fit_loop
        end_of_batch, end_of_epoch = loop.epoch_loop.on_advance_end, loop.on_advance_end

        def end_batch(*args: Any, **kwargs: Any) -> None:
            self._stop_or_go_on()  # before a validation
            end_of_batch(*args, **kwargs)
            self._stop_or_go_on()

        def end_epoch() -> None:
            before_epoch_end()
            end_of_epoch()
            self._stop_or_go_on()

        fit.strategy.patches.put(loop.epoch_loop, "on_advance_end", end_batch)
        fit.strategy.patches.put(loop, "on_advance_end", end_epoch)

    @override
    def why(self, in_step: bool = True) -> Why:
        return super().why(in_step) or (Why.WILL if self._wants_to_stop else Why.GOES_ON)

    def agree_in_step(self) -> None:
        """End the fit after the step that runs, in whose exchange ranks said different things.

        Raises:
            RuntimeError: `min_epochs` or `min_steps` forbids to end here; on all ranks alike.
        """
        step = self._trainer.global_step + 1
        self.agree(self.why(), step, common=step)
        self._agreed = True

    def _stop_or_go_on(self) -> None:
        """Stop here if all do, else go on with the next step."""
        trainer = self._trainer
        if self._agreed:
            return
        if trainer.should_stop and may_stop_early(trainer):
            if self.meeting.can_ask and self.meeting.stand().all_stand:
                self._agreed = True
                return
            self._wants_to_stop, trainer.should_stop = True, False
        self.meeting.move(self.meeting.step + 1)


class MeetEveryStep(Pace[EveryStep]):
    """Lets what is exchanged in a step carry who stops, and who ends with it.

    Args:
        fit: whose ranks stay together.
    """

    def __init__(self, fit: Fit[EveryStep]) -> None:
        super().__init__(fit)
        self._end = LockstepEnd(fit)
        fit.between.wants(lambda: fit.sigterm.requested, self._end.why)

    @override
    def begin(self, resumed: bool) -> None:
        self.between.follow_parameters()

    @override
    def validation_begins(self) -> None:
        super().validation_begins()
        self.between.average_buffers()

    @override
    def fit_ends(self) -> None:
        self.between.average_buffers()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if not stopped_by_hand(self._fit.strategy.module):
            self.between.average_buffers()
        return read()

    @override
    def _after_step(self, stop: bool) -> bool:
        stop_agreed = super()._after_step(stop)
        if self.between.parted:
            self.between.parted = False
            self._end.agree_in_step()
        return stop_agreed
