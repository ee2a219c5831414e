"""State and hooks of one fit, from a strategy's `setup` to its `teardown`.

`FitSession` implements the behavior that all strategies share. Its subclasses differ in how ranks
depend on each other: they train independently (`local_weights`), exchange data at every optimizer
step (`lion.strategy`), or share a model and communicate on every batch (`domino.strategy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.ledger import (
    END,
    VALIDATION,
    Ledger,
    StepMeans,
    Traffic,
    ring_all_reduce_bytes,
)
from lightning_commfree.comm.text import traffic_sentences
from lightning_commfree.fit.clock import Clock, StepHooks
from lightning_commfree.fit.contracts import Algorithm
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.fit.stopping import Stopping
from lightning_commfree.host import pl
from lightning_commfree.lightning_internals import STEPS, Patches, add_to_rows, around_steps
from lightning_commfree.model.shards import local_tensor
from lightning_commfree.model.trained import trained_parameters

B = TypeVar("B", bound=Algorithm)


class FitSession(Generic[B]):
    """State of one fit, and its hooks in the order in which they are called.

    `numel` is the number of trained parameters in the full model, before sharding. Collective: if
    the ranks have different algorithms, a `ValueError` is raised on all of them.
    """

    least_ranks = 1  # minimum size of the DDP job with which traffic is compared
    trains_independently = False  # ranks exchange nothing at most steps
    exchanges_every_step = False  # each step's exchange carries requests, and compares weights
    computing = False  # whether a training step is running
    accumulates = False  # whether no optimizer step follows the training step

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        between: B,
        stopping: Stopping,
        patches: Patches,
        numel: int,
    ) -> None:
        self.between: B = between
        self._trainer, self._module = trainer, trainer.lightning_module
        self._ranks, self._channels, self._stopping = ranks, ranks.channels, stopping
        self.clock = stopping.clock
        check_agreement(self._world, between.fingerprint())

        num_ranks = max(ranks.size, self.least_ranks)
        ddp_bytes = float(ring_all_reduce_bytes(4 * numel, num_ranks))
        traffic = Traffic(*between.cycle(), ddp_bytes)
        self.log = FitLog(trainer, self._world.ledger, traffic, between.figures, patches)
        stopping.sigterm.stops_after = self.stops_after
        loop = trainer.fit_loop.epoch_loop.val_loop
        patches.put(loop, "on_run_start", partial(self._start_validation, loop.on_run_start))
        patches.put(loop, "on_run_end", partial(self._end_validation, loop.on_run_end))
        patches.put(trainer, "save_checkpoint", partial(self._save, trainer.save_checkpoint))
        around_steps(trainer, patches, self._notice_left_out)
        self._hooks: StepHooks | None = None
        self._in_optimizer_step = not STEPS.works(trainer)
        self._at_begin: tuple[int, list[int]] | None = None  # steps and hashes of the weights

    def begin(self, resumed: bool) -> None:
        """Set the step count, and start agreeing on stops and counting traffic for the summary.

        Called before the first training step, after hooks that may have changed the weights.
        `resumed` is whether the algorithm's state was restored from a checkpoint.
        """
        del resumed
        self.clock.steps = self.steps_before()
        self._hooks = StepHooks(
            self._module, self._raw_step_begins, self._raw_step_ends, self.before_any_step
        )
        self._at_begin = self.clock.steps, self._weight_hashes()
        self._stopping.begin(self.trains_independently, self.exchanges_every_step)
        self.log.begin()

    def steps_before(self) -> int:
        """Return the number of steps taken before a fit is resumed, as counted by `clock`."""
        return self._trainer.global_step

    def batch_begins(self) -> None:
        """End the epoch after the next batch if it is the last of any rank's stream; collective.

        Called before training on it; only ranks that communicate on every batch take part.
        """
        self._stopping.share_last_batch(self._channels.within)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager that wraps a training step, and sets `computing` while it runs."""
        self.computing = True
        try:
            with self._counted(None):
                yield
        finally:
            self.computing = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context manager that sets `accumulates` during a step that only accumulates gradients."""
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Return a context manager that wraps a batch's backward pass from its loss."""
        del loss
        return nullcontext()

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Context manager that wraps an optimizer step, and then runs the exchanges that are due.

        With manual optimization, they run after the whole `training_step` instead, and a step
        outside of it raises a `RuntimeError`.
        """
        self._refuse_outside_batch(optimizer)
        with self._hooks.paused() if self._hooks else nullcontext(), self._counted(optimizer):
            yield

    def _refuse_outside_batch(self, optimizer: Optimizer) -> None:
        """Raise a `RuntimeError` for a manual step outside of `training_step`."""
        if self.clock.spans_batch and not self.computing:
            raise RuntimeError(
                f"`{type(optimizer).__name__}` was stepped outside of `training_step`. With manual"
                " optimization the replicas synchronize when `training_step` returns, so this step"
                " would be missed and the replicas could end up with different weights. Step"
                " optimizers in `training_step`."
            )

    def _raw_step_begins(self, optimizer: Optimizer) -> None:
        """Begin a step that Lightning does not pass to the strategy; see `StepHooks`."""
        if not self._trainer.training:  # in a validation, the algorithm takes no part
            return
        if self.clock.spans_batch:
            self._refuse_outside_batch(optimizer)
        elif self._in_optimizer_step:
            self._stopping.step_begins()
            with self.between.stepping():
                pass  # only what must precede a step: a vote cannot start during its backward

    def _raw_step_ends(self, optimizer: Optimizer) -> None:
        """Count a step that Lightning does not pass to the strategy, and run due exchanges."""
        # with automatic optimization, a step anywhere else is local training
        if self._trainer.training and (self.clock.spans_batch or self._in_optimizer_step):
            self._step_ends(optimizer)

    def before_any_step(self, optimizer: Optimizer) -> None:
        """Hook for subclasses that runs before any optimizer steps parameters of the module."""

    def _notice_left_out(self, run: Callable[..., None], *args: Any) -> None:
        """Run `run`, Lightning's `optimizer_step`; call `step_left_out` if no step was taken."""
        before, self._in_optimizer_step = self.clock.steps, True
        try:
            run(*args)
            if self.clock.steps == before:
                self.step_left_out()
        finally:
            self._in_optimizer_step = False

    def step_left_out(self) -> None:
        """Count a batch in which the module's `optimizer_step` did not step its optimizer."""
        self.clock.missed += 1

    @contextmanager
    def _counted(self, optimizer: Optimizer | None) -> Iterator[None]:
        """Context manager around a step, or part of one; exchanges run after a whole step.

        `optimizer` is the optimizer being stepped, or None for a whole `training_step`.
        """
        if self.clock.spans_batch != (optimizer is None):  # only part of a step, or before one
            yield
            self.clock.tick(optimizer)
            return
        self._stopping.step_begins()
        # the ranks of a replica exchange gradients inside the `with` block
        with self.between.stepping(), self._ranks.guarded("gradients"):
            yield
        self._step_ends(optimizer)

    def _step_ends(self, optimizer: Optimizer | None) -> None:
        """Count a step if one is complete, and run the exchanges that are due after it."""
        stepped = self.clock.tick(optimizer)
        if self.clock.spans_batch and optimizer is None:
            self._stopping.batch_ends(stepped)
        if not stepped:  # part of a batch, or no optimizer has stepped in it
            return
        self.between.after_step()
        self._stopping.follow_requests()
        self.after_step()
        self.log.after_step()

    def follow_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that a hook has set in place of the old ones with a `RuntimeError`.

        A session that supports other optimizers overrides this.
        """
        raise RuntimeError(
            f"A hook replaced `trainer.optimizers` during the fit (with"
            f" {', '.join(f'`{type(one).__name__}`' for one in optimizers)}), which"
            f" {self.between.name} does not support. Create the optimizer in"
            " `configure_optimizers` and change its `param_groups` instead, or use"
            " `StreamingDiLoCoStrategy`, under which hooks may replace optimizers."
        )

    def after_step(self) -> None:
        """Hook for subclasses that runs after a step, once ranks have agreed on whether to stop."""

    def stops_after(self) -> int | None:
        """Return the step after which all ranks would stop if SIGTERM came now; None if unknown.

        This default applies if ranks exchange flags at every step. The current step may already
        have sent its flags, so the request would be sent with the next step.
        """
        return self.clock.steps + 2

    def _save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Check that all ranks are at the same step, then run Lightning's `save`; collective."""
        self._stopping.meet("A checkpoint was saved")
        save(*args, **kwargs)

    def _start_validation(self, start: Callable[[], None]) -> None:
        """Check that all ranks are at the same step, then begin a validation; collective."""
        if not self._trainer.sanity_checking:
            self._stopping.meet("A validation began")
        # Lightning calls the strategy's own hook too late: the hooks of callbacks and module run
        # before it, and may swap averaged weights in, and out again before `validation_ends`
        self.validation_begins()
        start()

    def _end_validation(self, end: Callable[[], Any]) -> Any:
        """Run `end`, Lightning's own, then `validation_ends`; return the outputs of `end`."""
        # the strategy's own hook comes too early: `on_validation_model_train`, which may take
        # adapters out of the weights again, runs after it
        outputs = end()
        self.validation_ends()
        return outputs

    def validation_begins(self) -> None:
        """Start counting traffic as validation traffic; warn if ranks train without steps.

        Called before Lightning's first validation hook, `on_validation_model_eval`.
        """
        ledger = self._world.ledger
        self._phase_before, ledger.phase = ledger.phase, VALIDATION
        self._warn_uncounted()

    def validation_ends(self) -> None:
        """Stop counting validation traffic, and stop the fit if any rank requests it; collective.

        Called after Lightning's last validation hook, `on_validation_model_train`. A sanity check
        never stops the fit.
        """
        self._world.ledger.phase = self._phase_before
        if not self._trainer.sanity_checking:
            self._stopping.agree_here()

    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Call `read` while the module holds the weights to save, and return the state it read."""
        return read()

    def check_save(self) -> None:
        """Hook before a checkpoint is written: check the weights, warn or raise; collective.

        Subclasses raise an error on all ranks if the checkpoint would contain NaN or Inf.
        """
        self._warn_uncounted()

    def _weight_hashes(self) -> list[int]:
        """Return a hash of each trained parameter, or of this rank's shard of it."""
        trained = trained_parameters(self._module, self._trainer.optimizers)
        return [int(digest(local_tensor(p).contiguous())) for p in trained.values()]

    def _warn_uncounted(self) -> None:
        """Warn once if the weights have changed but no step was counted."""
        if self._at_begin is None or self.clock.steps != self._at_begin[0]:
            self._at_begin = None
        elif self._weight_hashes() != self._at_begin[1]:
            self._at_begin = None
            rank_zero_warn(
                "The ranks are training apart: weights have changed since the fit began, but no"
                " optimizer step was counted, so nothing was exchanged. Train them with a"
                " `torch.optim.Optimizer` whose `step` is called in `training_step` or"
                " `optimizer_step`. (Only a hook that changed weights before the first step is"
                " harmless.)"
            )

    def fit_ends(self) -> None:
        """Hook for subclasses that runs after the last training step."""

    def requeue(self) -> None:
        """Save and requeue the SLURM job, if its signal has stopped all ranks; collective."""
        self._stopping.sigterm.requeue()

    def end(self) -> None:
        """Release the algorithm's resources, even after a failed fit."""
        if self._hooks is not None:
            self._hooks.close()
        self.log.close()
        self.between.close()

    @property
    def _world(self) -> Channel:
        """The channel between all ranks."""
        return self._channels.world


class OutsideOfFit(FitSession[Any]):
    """Placeholder session for when no fit is running; leaves everything to Lightning."""

    def __init__(self) -> None:
        """Create only a clock, which manual optimization needs."""
        self.clock, self._hooks, self._at_begin = Clock(), None, None

    @override
    @contextmanager
    def _counted(self, optimizer: Optimizer | None) -> Iterator[None]:
        """Count nothing, and exchange nothing."""
        yield  # a step taken manually after `fit` trains only this rank

    @override
    def requeue(self) -> None:
        """Do nothing."""

    @override
    def end(self) -> None:
        """Do nothing."""


class FitLog:
    """Adds the metrics of one fit to the rows that the Trainer's loggers receive.

    The metrics appear only in these rows, not in `callback_metrics`, `logged_metrics` or the
    results of `validate`, and no row is logged just for them. Traffic metrics are means over the
    algorithm's latest complete cycles, at least `log_every_n_steps` steps. They cover only training
    steps, not the start, validation, checkpoints or the last exchange. `more` returns the
    algorithm's own metrics, and is called only when a row needs them.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ledger: Ledger,
        traffic: Traffic,
        more: Callable[[], Mapping[str, float]],
        patches: Patches,
    ) -> None:
        self._trainer, self._ledger, self._more = trainer, ledger, more
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.traffic, self._means = traffic, StepMeans(ledger, traffic, max(every, 1))
        self._steps_in_rows = 0
        self._before = ledger.totals()
        self._last: dict[str, float] | None = None
        add_to_rows(trainer, patches, self._metrics_for)

    def begin(self) -> None:
        """Start counting traffic for the summary; called when training starts."""
        self._before = self._ledger.totals()

    def after_step(self) -> None:
        """Count a step."""
        self._ledger.phase = END  # until the next step begins
        self._means.after_step()

    @property
    def steps(self) -> int:
        """Number of steps that have been counted."""
        return self._means.steps

    def figures(self) -> dict[str, float]:
        """Return the current metrics by name or, after the fit, the last ones."""
        if self._last is not None:
            return dict(self._last)
        return {**self._means.figures(), **self._more()} if self._means.steps else {}

    def summary(self, to: str = "") -> str:
        """Return a summary of the fit's traffic for the user.

        `to` is inserted after the number of bytes sent, for example " to other replicas".
        """
        now, steps = self._ledger.totals(), self._means.steps
        sent = now.bytes_sent - self._before.bytes_sent
        waited_s = now.seconds_waited - self._before.seconds_waited
        ddp = steps * self.traffic.ddp_bytes_per_step
        return traffic_sentences(steps, sent, ddp, waited_s, to)

    def close(self) -> None:
        """Stop updating metrics at the end of the fit; `figures` still returns the last ones."""
        self._last, self._more = self.figures(), dict

    def _metrics_for(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics to add to a logger's row, or {} if no step followed the last row."""
        logs = self._trainer.loggers and self._trainer.training
        if not logs or self._means.steps == self._steps_in_rows:
            return {}
        self._steps_in_rows = self._means.steps
        return {name: figure for name, figure in self.figures().items() if name not in row}
