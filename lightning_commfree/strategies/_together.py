"""Ranks that meet in every batch say behind each backward what the others must know.

One exchange of 32 bytes a rank takes the place of Lightning's own broadcast per batch:

- a gradient is not finite: all stop before the step (`domino.finite`);
- the data or the will of some ranks end with this step: all end the fit after it (`CommonEnd`);
- SIGTERM has come: all stop after this step (`DeferredSigterm`);
- a rank is somewhere else, for it has got no batch, or skips some: an error on all, that names it.
"""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.in_step import InStep, Place, Where
from lightning_commfree.lightning_internals import Patches
from lightning_commfree.strategies._common_end import CommonEnd
from lightning_commfree.strategies.signals import DeferredSigterm

_NONFINITE, _STEPS, _SIGTERM, _WHY = 1, 2, 4, 8  # from the last bit on: why the fit ends


class Together:
    """Keeps the ranks of one Trainer's fit together, from `install` to `remove`.

    Args:
        channel: to all ranks, of host memory.
        trainer: in its fit.
    """

    def __init__(self, channel: Channel, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._channel, self._in_step = channel, InStep(channel)
        self._sigterm, self._ends = DeferredSigterm(), CommonEnd()
        self._patches = Patches()

    def install(self) -> None:
        """Patch what Lightning would do without asking; in `Strategy.setup`."""
        self._sigterm.install(self._trainer)
        self._ends.install(self._trainer, self._channel)
        loop = self._trainer.fit_loop
        end_epoch = loop.on_advance_end

        def end_together() -> None:
            self._tell(Where.EPOCH)
            end_epoch()

        self._patches.put(loop, "on_advance_end", end_together)

    def remove(self) -> None:
        """Give Lightning its own methods back."""
        for patches in (self._sigterm, self._ends, self._patches):
            patches.remove()

    def first_batch(self) -> None:
        """See that all ranks have got a batch of this epoch.

        Raises:
            RuntimeError: some have none; on all ranks alike.
        """
        self._tell(Where.BATCH)

    def after_backward(self, steps: bool, finite: bool) -> bool:
        """Return whether the gradients of all ranks are finite.

        Args:
            steps: an optimizer step follows on this rank; otherwise it accumulates.
            finite: this rank's are.

        Raises:
            RuntimeError: on all ranks alike: they are not in the same batch, some would step and
                others accumulate, or the fit would end before it may.
        """
        word = _NONFINITE * (not finite) | _STEPS * steps | _SIGTERM * self._sigterm.requested
        words = self._tell(Where.BACKWARD, word | _WHY * (self._ends.why() if steps else 0))
        stepping = [rank for rank, said in enumerate(words) if said & _STEPS]
        if 0 < len(stepping) < len(words):
            raise RuntimeError(
                f"The data of the ranks {stepping} ended with a batch in the middle of accumulated"
                f" ones, after step {self._trainer.global_step}, and the other ranks would have"
                " gone on. Give all ranks equally many batches, as with `limit_train_batches`."
            )
        if steps and any(said & _SIGTERM for said in words):  # not in the middle of a step
            self._sigterm.agree()
        if len({said // _WHY for said in words}) > 1:
            self._ends.agree()
        return not any(said & _NONFINITE for said in words)

    def _tell(self, where: Where, word: int = 0) -> list[int]:
        loop = self._trainer.fit_loop
        epoch = loop.epoch_progress.current.ready - 1
        return self._in_step.tell(Place(where, epoch, loop.epoch_loop.batch_idx), word)
