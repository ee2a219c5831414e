"""Ranks that train apart on weights of their own, and rarely meet.

- *Shown*: a validation and a checkpoint hold the shared weights; the local ones come back after it.
- *Ended*: before its last validation and checkpoint the algorithm makes all ranks equal
  (`LocalEnd`).
- *Saved*: what was saved before that, after the same step, is written again (`EarlySaves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.meeting import Stage
from lightning_commfree.model.replication import common_start
from lightning_commfree.model.weight_swap import ADVICE
from lightning_commfree.resume.files import FilePath
from lightning_commfree.resume.rank_files import copied
from lightning_commfree.strategies.averages import average_outer_weights
from lightning_commfree.strategies.contracts import LocalUpdates
from lightning_commfree.strategies.early_saves import EarlySaves, scores_its_saves
from lightning_commfree.strategies.ending import LocalEnd
from lightning_commfree.strategies.pace import Fit, Pace
from lightning_commfree.strategies.signals import stopped_by_hand
from lightning_commfree.strategies.trial import let_finders_try


class MeetRarely(Pace[LocalUpdates]):
    """Shows, saves and ends with the weights that replicas share.

    Args:
        fit: whose ranks train apart.
    """

    def __init__(self, fit: Fit[LocalUpdates]) -> None:
        super().__init__(fit)
        self._swap = fit.between.weight_swap
        self._end, self._early_saves = LocalEnd(fit), EarlySaves()
        self._unready_said = False
        self._put_averages_in = average_outer_weights(fit.strategy, self._swap)
        let_finders_try(fit.strategy)
        self._settle_around_saves()

    # -- the moments of a fit

    @override
    def begin(self, resumed: bool) -> None:
        differ = any(self._fit.strategy.ranks.all_flags(not self._swap.is_local()))
        if differ and not resumed:
            # `on_fit_start` or `on_train_start` has written to the weights, and DDP would train
            # what they are now; here all ranks must hold and share the same: rank 0's
            channels = self._fit.channels
            common_start(channels.world, self._fit.strategy.module, {}, channels.between)
            self._swap.take_local()
        # saved when a fit had ended: to finish a second time would move nothing
        self._end.begin(finished=resumed and not differ)

    @override
    def stops_after(self) -> int | None:
        return self.between.stops_after

    @override
    def validation_begins(self) -> None:
        super().validation_begins()
        self._end.meeting.enter(Stage.VALIDATION)
        self._end.meet(again=True, validates=True)
        if not self._fit.trainer.sanity_checking:
            self._say_unready("validation")
        if self._end.finished and not self._swap.is_local(buffers=False):
            raise RuntimeError(
                f"Parameters were written to after the last step of the fit. {ADVICE}"
            )
        self._swap.put_in(self._shown())

    @override
    def validation_ends(self) -> None:
        self._swap.put_back()
        self._end.meeting.stands = False
        super().validation_ends()

    @override
    def fit_ends(self) -> None:
        self._end.meeting.enter(Stage.FIT_END)
        self._end.finish()
        self._early_saves.write_again(self._fit.trainer, self.between.step)
        self._put_averages_in()

    @override
    def end(self) -> None:
        self._swap.put_back(check=False)  # an exception may have come in the middle of a validation
        interrupted = self._fit.trainer.state.status == TrainerStatus.INTERRUPTED
        if self._end.finished_at is None and not interrupted:
            self._swap.put_in()  # a resumed fit had nothing left to train
        super().end()

    # -- collectives and checkpoints of Lightning's

    @override
    def meets(self) -> bool:
        return self.computing or self._end.meet()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with self._settled() as stays:
            state = read()
            # what is frozen stays what it is: it may be large
            return state if stays else copied(state, only=self._swap.in_module)

    @override
    def may_save(self, checkpoint: Mapping[str, Any], filepath: FilePath) -> bool:
        weights_only = "optimizer_states" not in checkpoint
        if self._end.meeting.alone:
            self._early_saves.owe(filepath, weights_only)
            return False
        self.between.refuse_to_save(self._fit.world)
        self._say_unready("checkpoint")
        if not self._end.finished:
            self._early_saves.note(filepath, self.between.step, weights_only)
        return True

    @override
    def removes(self, filepath: FilePath) -> None:
        self._early_saves.forget(filepath)

    # -- inside

    @override
    def _after_step(self, stop: bool) -> bool:
        stop_agreed = super()._after_step(stop)
        return self._end.after_step(stop) or stop_agreed

    @contextmanager
    def _settled(self) -> Iterator[bool]:
        """In the body the module holds the shared weights, and nothing is on the wire.

        It is given whether these weights stay in the module after it.
        """
        if stopped_by_hand(self._fit.strategy.module):
            yield True
            return
        if not scores_its_saves(self._fit.trainer):  # else the scored weights are saved first
            if self._end.is_near():  # this validation or checkpoint turned out to be the last
                self._end.finish()
            if self._end.finished:
                self.between.follow_hooks()
        self.between.wait_in_flight()
        stays = self._swap.is_in
        with self._swap.outer_weights(self._shown()):
            yield stays

    def _settle_around_saves(self) -> None:
        strategy, save = self._fit.strategy, self._fit.trainer.save_checkpoint

        def save_settled(*args: Any, **kwargs: Any) -> None:
            if strategy.now is not self:  # this rank tries something by itself
                save(*args, **kwargs)
                return
            self._end.meet(again=True)
            with self._settled():  # hooks that add to a checkpoint see what it holds
                save(*args, **kwargs)

        self._fit.strategy.patches.put(self._fit.trainer, "save_checkpoint", save_settled)

    def _shown(self) -> Sequence[Tensor] | None:
        """Return what the module holds in place of the shared weights; None: these."""
        if self._end.finished or self._fit.trainer.sanity_checking or self._swap.is_in:
            return None
        return self.between.shown()

    def _say_unready(self, what: str) -> None:
        text = None if self._unready_said else self.between.unready(what)
        if text is not None:
            self._unready_said = True
            rank_zero_warn(text)
