"""The end of a fit: is it near, why, and the same on all ranks.

The data or the will of some ranks end with a step, and those of others do not. A rank that left
alone would be waited for. So:

1. With what a rank sends anyway it says whether its part ends (`CommonEnd.why`).
2. All ranks learn from the same exchange that not all have said the same.
3. In one small exchange they tell each other who ends by what and after which step (`agree`). They
   end after the same step, with the same weights, and a message names the ranks.

If all ranks end alike, an epoch or the fit is over, and nothing is said or sent. Only where ranks
meet differs:

======== ============================ ========================================= =============
strategy ranks meet                   the word travels with                     object
======== ============================ ========================================= =============
Domino   behind every backward        32 bytes of its own (`comm.in_step`)      `every_batch`
Lion     in every optimizer step      the header of the votes                   `LockstepEnd`
DiLoCo   at a fragment's landing, and the header of a fragment, or an answer    `LocalEnd`
         where Lightning sends        (`comm.meeting`)
======== ============================ ========================================= =============
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus

from lightning_commfree.comm.ledger import END
from lightning_commfree.comm.meeting import Stage
from lightning_commfree.comm.parting import Part, Why, part
from lightning_commfree.lightning_internals import data_used_up, may_stop_early
from lightning_commfree.strategies.contracts import LocalUpdates
from lightning_commfree.strategies.early_saves import scores_its_saves
from lightning_commfree.strategies.pace import Fit

_EVEN = "Give all ranks equally many batches, as with `limit_train_batches`"


class CommonEnd:
    """The end of a fit.

    Args:
        fit: that will end.
        unit: as `Meeting` takes it.

    Attributes:
        meeting: where this rank is, and where it waits for the others.
    """

    def __init__(self, fit: Fit[Any], unit: str) -> None:
        self._trainer, self._world = fit.trainer, fit.world
        self.meeting = fit.world.meeting(unit)

    def why(self, in_step: bool = True) -> Why:
        """Return by what this rank's epoch or fit ends.

        Args:
            in_step: with the optimizer step that runs, which the Trainer has not counted yet.
        """
        if data_used_up(self._trainer):
            return Why.DATA
        return self._why_no_step_follows(in_step)

    def is_near(self, in_step: bool = False) -> bool:
        """Return whether no further optimizer step will follow, as far as anybody knows now.

        Lightning decides it in nested loops; here is the same decision at one moment.
        `Strategy.on_train_end` is the last hook of a fit: callbacks have validated and written
        their last checkpoint by then. What must be in that checkpoint has to happen before, so the
        end is foreseen wherever it can be.

        Args:
            in_step: as `why` takes it.
        """
        if self._why_no_step_follows(in_step):
            return True
        loop = self._trainer.fit_loop
        epoch: Any = loop.epoch_progress.current
        if loop.max_epochs is None or loop.max_epochs == -1:
            return False
        if epoch.started < epoch.ready:  # it begins; the counter of batches is the last epoch's
            return False

        batches_reached = data_used_up(self._trainer)
        if in_step:  # within an epoch, which is processed when it has run through
            return epoch.processed >= loop.max_epochs - 1 and batches_reached
        # `ready` counts the epochs that were begun; a fit resumed at an epoch's end counts one few
        return epoch.ready >= loop.max_epochs and (
            epoch.processed >= loop.max_epochs or batches_reached
        )

    def agree(self, why: Why, step: int, common: int, in_step: bool = True) -> Stage:
        """End the fit on all ranks after the same step, and say on each of them why.

        Collective over the world. Where it ends on all of them with the same step, by data here and
        `max_steps` there, say, they do so alike, and nothing is said.

        Args:
            why: this rank's part has ended.
            step: after which it has.
            common: the step after which all end.
            in_step: as `why` takes it.

        Returns:
            The first stage of `meeting` to which all ranks come from where they are.

        Raises:
            RuntimeError: `min_epochs` or `min_steps` forbids to end here; on all ranks alike.
        """
        refuses = why.would_go_on and not may_stop_early(self._trainer, in_step)
        parted = part(self._world, Part(why, step, self.meeting.stage, refuses))
        if parted.refused:
            loop = self._trainer.fit_loop
            raise RuntimeError(
                f"{parted.said}. The fit cannot end here, for `min_epochs={loop.min_epochs}` and"
                f" `min_steps={loop.min_steps}`. {_EVEN}, or leave these out."
            )
        if parted.said:
            warnings.warn(
                f"{parted.said}. All ranks end the fit when they learn of it, after step {common},"
                f" with the same weights. {_EVEN}, and let all of them decide alike when to stop,"
                " for a fit that goes on.",
                stacklevel=2,
            )
        self._trainer.should_stop = True
        return parted.stage

    def _why_no_step_follows(self, in_step: bool) -> Why:
        trainer = self._trainer
        if trainer.max_steps != -1 and trainer.global_step + in_step >= trainer.max_steps:
            return Why.MAX_STEPS
        wants = trainer.should_stop and may_stop_early(trainer)
        return Why.WILL if wants else Why.GOES_ON


class LocalEnd(CommonEnd):
    """The end of a fit whose ranks train apart and rarely meet; it finishes once per last step.

    The algorithm takes its last round where a rank finds that its fit ends: after a step, or before
    one of Lightning's collectives that follow a step (a checkpoint, a validation, the end of an
    epoch). A rank that comes to such a collective asks first who else does (`comm.meeting`). Who
    does not come has ended its fit, or will wait for ranks whose next exchange it lacks; so the fit
    ends for all.

    Then the ranks may stand at different stages of their last step. They meet again at the first
    one to which all of them come. Until then each is alone: its collectives return what it put in,
    and a checkpoint is written when the fit ends.

    Args:
        fit: that will end.

    Attributes:
        finished_at: the step after which the algorithm has finished; None: it has not.
    """

    def __init__(self, fit: Fit[LocalUpdates]) -> None:
        super().__init__(fit, "step")
        self._algorithm, self._sigterm = fit.between, fit.sigterm
        self.finished_at: int | None = None
        self._trains = False
        end_of_epoch = fit.trainer.fit_loop.on_advance_end

        def end_epoch() -> None:
            self.meeting.enter(Stage.EPOCH_END)
            end_of_epoch()

        fit.strategy.patches.put(fit.trainer.fit_loop, "on_advance_end", end_epoch)

    def begin(self, finished: bool) -> None:
        """Train from now on; before, the ranks do the same without being asked.

        Args:
            finished: the algorithm has finished after its latest step.
        """
        self._trains = True
        self.finished_at = self._algorithm.step if finished else None
        self.meeting.move(self._algorithm.step)

    @property
    def finished(self) -> bool:
        """Whether the algorithm has finished after its latest step."""
        return self.finished_at == self._algorithm.step

    def after_step(self, stop: bool) -> bool:
        """Finish if the step that runs is the last; return whether the ranks agreed to stop.

        Args:
            stop: this rank has received SIGTERM.
        """
        self.meeting.move(self._algorithm.step)
        if self.is_near(in_step=True):
            return self._finish(stop, self.why() or Why.DATA, in_step=True)
        if self._algorithm.parted:
            return self._finish(stop, Why.GOES_ON, in_step=True)
        return False

    def meet(self, again: bool = False, validates: bool = False) -> bool:
        """See, before a collective of Lightning's, that all ranks come to it; else end the fit.

        Args:
            again: also if this rank has met the others at this stage.
            validates: a validation begins.

        Returns:
            Whether they do. If not the collective is this rank's alone.
        """
        if not self._trains or self._trainer.state.status == TrainerStatus.INTERRUPTED:
            return True
        if not self.finished and (again or not self.meeting.stands):
            # what bears a score is saved before the weights change
            first = validates or not scores_its_saves(self._trainer)
            ending = first and self.is_near()
            met = self.meeting.stand(ending)
            if met.ends or not met.all_stand:
                over = ending or data_used_up(self._trainer)
                apart = Why.APART if met.passed else Why.GOES_ON
                self.finish(None if over else apart)
        return not self.meeting.alone

    def finish(self, why: Why | None = None) -> None:
        """Finish between two steps, and let the Trainer stop if some rank has received SIGTERM.

        Args:
            why: this rank's part ends; None: as the Trainer says.
        """
        if why is None:
            why = self.why(in_step=False) or Why.DATA
        if self._finish(self._sigterm.requested, why):
            self._sigterm.agree()

    def _finish(self, stop: bool, why: Why, in_step: bool = False) -> bool:
        algorithm, step = self._algorithm, self._algorithm.step
        if self.finished:
            return False
        self.meeting.leave()
        with self._world.ledger.during(END):
            stop_agreed = algorithm.finish(stop, goes_on=why.would_go_on)
        self.finished_at = algorithm.step
        if algorithm.parted:
            algorithm.parted = False
            self.meeting.part(self.agree(why, step, algorithm.step, in_step))
        return stop_agreed
