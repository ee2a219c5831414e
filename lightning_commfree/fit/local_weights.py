"""Fit session for replicas that train local weights and synchronize only occasionally.

Validation and checkpoints use weights that are the same on all replicas: those that
`LocalCopies.shown` returns (under Streaming DiLoCo, by default the mean of the local weights), or
the shared weights if it returns None. The local weights are restored afterwards. Before the last
validation run and the last checkpoint, the algorithm makes the weights of all ranks equal
(`finish`), and again if a hook changes them afterwards. If a callback requests a stop only after a
checkpoint of the same step has been written, that file contains the weights from before `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.ledger import END
from lightning_commfree.fit.contracts import LocalCopies
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.fit.session import FitSession
from lightning_commfree.fit.stopping import Stopping
from lightning_commfree.host import ModelCheckpoint, TrainerStatus, callbacks, pl
from lightning_commfree.lightning_internals import Patches
from lightning_commfree.model.loading import LoadWatch
from lightning_commfree.model.replication import broadcast_initial_weights, digests_of_all
from lightning_commfree.model.shards import copy_to_cpu
from lightning_commfree.model.weight_swap import OuterView, WeightSwap

END_TAG = "end"


class LocalWeightsSession(FitSession[LocalCopies]):
    """Fit session for replicas that train independently on local weights.

    The module holds the local weights while it trains. Validation and checkpoints use the shared
    weights or those of `LocalCopies.shown`, and after the fit, the module holds the shared weights.
    """

    trains_independently = True
    same_hooks = True  # replicas call the same hooks after the same steps

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        between: LocalCopies,
        stopping: Stopping,
        patches: Patches,
        numel: int,
    ) -> None:
        super().__init__(trainer, ranks, between, stopping, patches, numel)
        self._swap = between.weight_swap
        self._finished_at: int | None = None  # the step after which the algorithm has finished
        self._trains = False
        self._loads: LoadWatch | None = None
        self._swap.self_changing = {
            f"{name}.weight".removeprefix(".")
            for name, one in self._module.named_modules()
            if getattr(one, "max_norm", None) is not None
        }
        self._swap_in_averages = average_shared_weights(trainer, patches, self._swap)

    @property
    def finished(self) -> bool:
        """Whether the algorithm has made all replicas' weights equal since the latest step."""
        return self._finished_at == self.between.step

    @override
    def steps_before(self) -> int:
        """Return the algorithm's own count of steps if a step is a batch, else Lightning's."""
        # Lightning does not save the number of batches that took a step; the algorithm does
        return self.between.step if self.clock.spans_batch else super().steps_before()

    # -- the hooks of a fit

    @override
    def begin(self, resumed: bool) -> None:
        """Begin; if a hook has changed the weights, all ranks start from rank 0's. Collective."""
        self._agree_on_buffers()  # a resumed fit may have restored buffers of other shapes
        differ = any(self._ranks.all_flags(not self._swap.local_equals_shared()))
        if differ and not resumed:
            # a hook has changed the weights, maybe on one rank only: as under DDP, all ranks
            # continue from rank 0's weights
            self.between.restart(self._broadcast_weights)
        if resumed and not differ:
            # the checkpoint may be from the end of a fit, where finishing again is a no-op
            self._finished_at = self.between.step
        self._trains = True
        self._loads = LoadWatch(self._module, self._local_weight_hashes)
        super().begin(resumed)

    def _local_weight_hashes(self) -> list[int] | None:
        """Return a hash per trained parameter; None while the shared weights are swapped in."""
        return None if self._swap.swapped_in else self._weight_hashes()

    @override
    def batch_begins(self) -> None:
        """Start over if a hook has loaded weights, and agree on the end of streams; collective."""
        if self._loads is not None and self._loads.take():
            self._restart()
        super().batch_begins()

    def _restart(self) -> None:
        """Continue from weights that a hook has loaded in the middle of the fit; collective."""
        self._stopping.check_together(
            "Weights were loaded (`load_state_dict`)",
            "Load them on all ranks after the same step.",
        )
        self.between.restart(self._broadcast_weights)
        rank_zero_warn(
            "Weights were loaded in the middle of the fit (`load_state_dict`). All replicas"
            " continue from rank 0's weights, without what was in flight and the outer optimizer's"
            " state."
        )

    def _broadcast_weights(self) -> None:
        """Copy rank 0's weights to all ranks; collective."""
        broadcast_initial_weights(self._world, self._module, {}, self._channels.between)

    @override
    def step_left_out(self) -> None:
        """Count the step anyway, and run the exchanges that are due after it."""
        # Counted as a step, as by `trainer.global_step`: other replicas do not have to leave it out
        # as well, and all remain at the same step.
        optimizer, before = self._trainer.optimizers[0], self.clock.uncounted
        self.clock.uncounted = 0
        try:
            self._raw_step_begins(optimizer)
            self._raw_step_ends(optimizer)
        finally:
            self.clock.uncounted = before

    @override
    def follow_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Accept optimizers that a hook has set: each replica trains with its own."""
        del optimizers

    @override
    def after_step(self) -> None:
        """After the fit's last step, make the weights of all ranks equal; collective."""
        if self._stopping.no_step_follows(during_step=True):
            self._stopping.share_stream_end()
            self._finish()

    @override
    def stops_after(self) -> int | None:
        """Return None: only the algorithm knows when a request reaches all replicas."""
        return None

    @override
    def validation_begins(self) -> None:
        """Swap in the shared weights, or those of `LocalCopies.shown`; collective."""
        super().validation_begins()
        if self._trains:
            self._agree_on_buffers()
        if self._trains and self._stopping.no_step_follows():
            self._finish()  # before the fit's last validation, so that it uses the final weights
        self._swap.swap_in(self._shown("validation"))

    @override
    def validation_ends(self) -> None:
        """Restore the local weights, then stop if any rank requests it; collective."""
        self._swap.swap_out()
        super().validation_ends()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return `read()` of the weights to save; copies swapped ones to the CPU. Collective."""
        with self._with_shared_weights() as stays:
            state = read()
            # copy only the swapped weights: frozen ones do not change, and may be large
            return state if stays else copy_to_cpu(state, only=self._swap.in_module)

    @override
    def fit_ends(self) -> None:
        """Make all ranks' weights equal, then swap in `WeightAveraging`'s averages; collective."""
        self._finish()
        self._swap_in_averages()

    @override
    def end(self) -> None:
        """Restore the local weights, or the shared ones if nothing was trained; end as the base."""
        if self._loads is not None:
            self._loads.close()
        self._swap.swap_out(check=False)  # an exception may have interrupted a validation
        interrupted = self._trainer.state.status == TrainerStatus.INTERRUPTED
        if self._finished_at is None and not interrupted:
            self._swap.swap_in()  # a resumed fit had nothing left to train
        super().end()

    # -- inside

    def _finish(self) -> None:
        """Make the weights of all ranks equal after the last step; collective."""
        if self._trainer.state.status == TrainerStatus.INTERRUPTED:
            return
        if self.finished:
            self._sync_late_changes()
            return
        self._stopping.check_epoch_ends()
        self._agree_on_buffers()
        with self._world.ledger.during(END):
            self.between.finish()
            self._stopping.follow_requests()
        self._finished_at = self.between.step

    def _sync_late_changes(self) -> None:
        """Make replicas equal again if hooks have changed weights since `finish`; collective."""
        if self._swap.swapped_in or not self.same_hooks:
            return
        changed = not self._swap.local_equals_shared(with_buffers=False)
        if not any(self._ranks.all_flags(changed)):
            return
        hashes = digests_of_all(self._channels.between, self._swap.in_module, END_TAG, digest)
        if all(self._ranks.all_flags(bool((hashes == hashes[0]).all()))):
            self._swap.take_local()  # a mean would be rounded by the wire format
        else:
            with self._world.ledger.during(END):
                self.between.finish()

    @contextmanager
    def _with_shared_weights(self) -> Iterator[bool]:
        """Context manager that swaps in the weights to save, after `_finish` if no step follows.

        Collective. Yields True if the module's weights stay the same afterwards: the shared weights
        were already in the module, or the fit was interrupted and nothing is swapped.
        """
        if self._ranks.interrupted:
            yield True
            return
        if self._trains and not self._swap.swapped_in:
            self._agree_on_buffers()
        ends = not self._saves_by_metric and self._stopping.no_step_follows()
        if self._trains and (ends or self.finished):
            self._finish()
        shown = self._shown("checkpoint")
        stays = self._swap.swapped_in
        with self._swap.outer_weights(shown):
            yield stays

    @property
    def _saves_by_metric(self) -> bool:
        """Whether a `ModelCheckpoint` selects checkpoints by a monitored metric.

        If so, a checkpoint must contain the weights that were scored, so it is saved before
        `finish` changes them.
        """
        savers = self._trainer.checkpoint_callbacks
        return any(isinstance(one, ModelCheckpoint) and one.monitor is not None for one in savers)

    @override
    def _save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Agree on a stop, then run `save` with the weights to save swapped in; collective."""

        def agree_and_save() -> None:
            self._stopping.agree_here()
            # `save` calls hooks that add entries to the checkpoint before it calls the strategy
            with self._with_shared_weights():
                save(*args, **kwargs)

        super()._save(agree_and_save)

    def _agree_on_buffers(self) -> None:
        """Stop averaging buffers whose shape has changed on any rank; collective."""
        buffers = self.between.averaged_buffers()
        if buffers is not None and (text := buffers.agree_on_replaced(self._ranks.all_rows)):
            rank_zero_warn(text)

    def _shown(self, what: str) -> Sequence[Tensor] | None:
        """Return what `LocalCopies.shown` lists to swap in, or None for the shared weights."""
        if self.finished or self._trainer.sanity_checking or self._swap.swapped_in:
            return None
        return self.between.shown(what)


_AVERAGING = getattr(callbacks, "WeightAveraging", None)  # Lightning 2.6 and later
_UPDATES = ("on_train_batch_end", "on_train_epoch_end")


def average_shared_weights(
    trainer: pl.Trainer, patches: Patches, swap: WeightSwap
) -> Callable[[], None]:
    """Make `WeightAveraging` average the shared weights; return a function to swap them in.

    Local weights differ between replicas, so their averages would differ too. Such a callback
    updates its average as often as under DDP, but with the shared weights. Everything else is
    unchanged: it swaps its average in for validation and at the end of the fit, and saves it in
    checkpoints. Call the returned function after `finish`, which needs the module's own weights.
    """
    ends = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if _AVERAGING is None or not isinstance(callback, _AVERAGING):
            continue
        for name in _UPDATES:
            patches.put(callback, name, partial(_update_with_shared, getattr(callback, name), swap))
        ends.append(callback.on_train_end)
        patches.put(callback, "on_train_end", lambda *_: None)

    def swap_in_averages() -> None:
        for end in ends:
            end(trainer, trainer.lightning_module)

    return swap_in_averages


def _update_with_shared(
    hook: Callable[..., None],
    swap: WeightSwap,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *args: Any,
) -> None:
    """Call an averaging callback's `hook` with a view of the shared weights."""
    hook(trainer, OuterView(module, swap), *args)
