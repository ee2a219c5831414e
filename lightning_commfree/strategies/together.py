"""Ranks that meet in every batch say behind each backward what the others must know.

One exchange of 32 bytes a rank takes the place of Lightning's own broadcast per batch:

- a gradient is not finite: all stop before the step (`domino.finite`);
- the data or the will of some ranks end with this step: all end the fit after it (`LockstepEnd`);
- SIGTERM has come: all stop after this step (`DeferredSigterm`);
- a rank is somewhere else, for it has got no batch, or skips some: an error on all, that names it.
"""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.in_step import InStep, Place, Where, Word
from lightning_commfree.strategies.lockstep_end import LockstepEnd
from lightning_commfree.strategies.signals import DeferredSigterm


class Together:
    """Keeps the ranks of one Trainer's fit together, from `install` to `remove`."""

    def __init__(self) -> None:
        self._sigterm, self._end = DeferredSigterm(), LockstepEnd()

    def install(self, trainer: pl.Trainer, world: Channel) -> None:
        """Patch what Lightning would do without asking; in `Strategy.setup`.

        Args:
            trainer: in its fit.
            world: the channel to all ranks, of host memory.
        """
        self._trainer, self._in_step = trainer, InStep(world)
        self._sigterm.install(trainer)
        self._end.install(trainer, world, lambda: self._tell(Where.EPOCH, Word()))

    def remove(self) -> None:
        """Give Lightning its own methods back."""
        self._end.remove()
        self._sigterm.remove()

    def first_batch(self) -> None:
        """See that all ranks have got a batch of this epoch.

        Raises:
            RuntimeError: some have none; on all ranks alike.
        """
        self._tell(Where.BATCH, Word())

    def after_backward(self, steps: bool, finite: bool) -> bool:
        """Return whether the gradients of all ranks are finite.

        Args:
            steps: an optimizer step follows on this rank; otherwise it accumulates.
            finite: this rank's are.

        Raises:
            RuntimeError: on all ranks alike: they are not in the same batch, some would step and
                others accumulate, or the fit would end before it may.
        """
        why = self._end.why() if steps else 0
        words = self._tell(
            Where.BACKWARD, Word(not finite, steps, self._sigterm.requested, int(why))
        )
        stepping = [rank for rank, word in enumerate(words) if word.steps]
        if 0 < len(stepping) < len(words):
            raise RuntimeError(
                f"The data of the ranks {stepping} ended with a batch in the middle of accumulated"
                f" ones, after step {self._trainer.global_step}, and the other ranks would have"
                " gone on. Give all ranks equally many batches, as with `limit_train_batches`."
            )

        if steps and any(word.stop for word in words):  # not in the middle of a step
            self._sigterm.agree()
        if len({word.why for word in words}) > 1:
            self._end.agree_in_step()
        return not any(word.nonfinite for word in words)

    def _tell(self, where: Where, word: Word) -> list[Word]:
        loop = self._trainer.fit_loop
        epoch = loop.epoch_progress.current.ready - 1
        return self._in_step.tell(Place(where, epoch, loop.epoch_loop.batch_idx), word)
