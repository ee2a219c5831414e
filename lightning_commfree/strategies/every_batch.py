"""Ranks that share a model meet in every batch, and say there what the others must know.

One exchange of 32 bytes a rank behind each backward takes the place of Lightning's own broadcast
per batch:

- a gradient is not finite: all stop before the step (`domino.finite`);
- the data or the will of some ranks end with this step: all end the fit after it (`LockstepEnd`);
- SIGTERM has come: all stop after this step (`DeferredSigterm`);
- a rank is somewhere else, for it has got no batch, or skips some: an error on all, that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.in_step import InStep, Place, Where, Word, refuse_half_steps
from lightning_commfree.domino import GradientMean, looks_finite, refuse_nonfinite
from lightning_commfree.strategies.every_step import LockstepEnd
from lightning_commfree.strategies.pace import Fit, Pace


class MeetEveryBatch(Pace[GradientMean]):
    """Keeps ranks together that would otherwise leave each other in a forward.

    Args:
        fit: whose ranks stay together.
    """

    def __init__(self, fit: Fit[GradientMean]) -> None:
        super().__init__(fit)
        self._in_step = InStep(fit.world)
        self._end = LockstepEnd(fit, lambda: self._tell(Where.EPOCH, Word()))

    def first_batch(self) -> None:
        """See that all ranks have got a batch of this epoch.

        Raises:
            RuntimeError: some have none; on all ranks alike.
        """
        self._tell(Where.BATCH, Word())

    @contextmanager
    @override
    def accumulating(self) -> Iterator[None]:
        self.between.average.active = False  # gradients stay here
        try:
            with super().accumulating():
                yield
        finally:
            self.between.average.active = True

    @override
    def after_backward(self, loss: Tensor) -> None:
        """Put the mean of all replicas' gradients into place, if an optimizer step follows.

        Raises:
            RuntimeError: on all ranks alike: a gradient is not finite, the ranks are not in the
                same batch, some would step and others accumulate, or the fit would end before it
                may.
        """
        fit, steps = self._fit, not self.accumulates
        module, within = fit.strategy.module, fit.channels.within
        finite = not steps or looks_finite(module.parameters())
        if not self._all_finite(steps, finite):
            step = fit.trainer.global_step + 1
            refuse_nonfinite(fit.world, module, loss, step, within.size)
        if steps:
            self.between.land(module)

    # -- inside

    def _all_finite(self, steps: bool, finite: bool) -> bool:
        """Tell the others what they must know; return whether the gradients of all are finite."""
        sigterm, why = self._fit.sigterm, self._end.why() if steps else 0
        word = Word(not finite, steps, sigterm.requested, int(why))
        words = self._tell(Where.BACKWARD, word)
        refuse_half_steps(words, self._fit.trainer.global_step)
        if steps and any(said.stop for said in words):  # not in the middle of a step
            sigterm.agree()
        if len({said.why for said in words}) > 1:
            self._end.agree_in_step()
        return not any(said.nonfinite for said in words)

    def _tell(self, where: Where, word: Word) -> list[Word]:
        loop = self._fit.trainer.fit_loop
        epoch = loop.epoch_progress.current.ready - 1
        return self._in_step.tell(Place(where, epoch, loop.epoch_loop.batch_idx), word)
