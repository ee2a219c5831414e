"""The end of a fit whose ranks train apart and rarely meet.

The algorithm takes its last round where a rank finds that its fit ends: after a step, or before one
of Lightning's collectives that follow a step (a checkpoint, a validation, the end of an epoch). A
rank that comes to such a collective asks first who else does (`comm.meeting`). Who does not come
has ended its fit, or will wait for ranks whose next exchange it lacks; so the fit ends for all.

Then the ranks may stand at different stages of their last step. They meet again at the first one to
which all of them come. Until then each is alone: its collectives return what it put in, and a
checkpoint is written when the fit ends.
"""

from __future__ import annotations

from lightning.pytorch.trainer.states import TrainerStatus

from lightning_commfree.comm.ledger import END
from lightning_commfree.comm.meeting import Stage
from lightning_commfree.comm.parting import Why
from lightning_commfree.loop_counters import data_used_up
from lightning_commfree.strategies.contracts import LocalUpdates
from lightning_commfree.strategies.early_saves import scores_its_saves
from lightning_commfree.strategies.ending import CommonEnd
from lightning_commfree.strategies.pace import Fit


class LocalEnd(CommonEnd):
    """Finishes once per last step.

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

        fit.patches.put(fit.trainer.fit_loop, "on_advance_end", end_epoch)

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
