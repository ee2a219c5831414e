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

from typing import Protocol

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import END
from lightning_commfree.comm.meeting import Stage
from lightning_commfree.comm.parting import Why
from lightning_commfree.loop_counters import data_used_up
from lightning_commfree.patches import Patches
from lightning_commfree.strategies.early_saves import scores_its_saves
from lightning_commfree.strategies.ending import CommonEnd
from lightning_commfree.strategies.signals import DeferredSigterm


class Finishing(Protocol):
    """An algorithm of replicas that take steps of their own.

    Attributes:
        step: steps done; after `finish`, those after which all replicas have ended.
        parted: not all replicas have ended after the same step, or some would have gone on; the
            same on all of them, from the exchange on in which they learn of it.
    """

    step: int
    parted: bool

    def finish(self, stop: bool, goes_on: bool) -> bool:
        """Make all replicas equal; a second call changes nothing.

        Args:
            stop: this rank has received SIGTERM.
            goes_on: this rank would have gone on.

        Returns:
            Whether some rank has received SIGTERM; the same on all of them.
        """


class LocalEnd(CommonEnd):
    """Finishes once per last step, from `install` to `remove`.

    Attributes:
        finished_at: the step after which the algorithm has finished; None: it has not.
    """

    def __init__(self) -> None:
        self.finished_at: int | None = None
        self._trains = False
        self._patches = Patches()

    def install(
        self, trainer: pl.Trainer, world: Channel, algorithm: Finishing, sigterm: DeferredSigterm
    ) -> None:
        """Begin with a fit."""
        self.watch(trainer, world, "step")
        self._algorithm, self._sigterm = algorithm, sigterm
        self.finished_at = None
        end_of_epoch = trainer.fit_loop.on_advance_end

        def end_epoch() -> None:
            self.meeting.enter(Stage.EPOCH_END)
            end_of_epoch()

        self._patches.put(trainer.fit_loop, "on_advance_end", end_epoch)

    def begin(self) -> None:
        """Train from now on; before, the ranks do the same without being asked."""
        self._trains = True
        self.meeting.move(self._algorithm.step)

    def remove(self) -> None:
        """Train no more, and give Lightning its own method back."""
        self._trains = False
        self._patches.remove()

    @property
    def finished(self) -> bool:
        """Whether the algorithm has finished after its latest step."""
        return self.finished_at == self._algorithm.step

    @property
    def alone(self) -> bool:
        """Whether this rank's collectives are its own for now."""
        return self._trains and self.meeting.alone

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

    def finish_if_near(self) -> None:
        """Finish ahead of a validation or checkpoint that turned out to be the last."""
        if self.is_near():
            self.finish()

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
