"""What a strategy has from `setup` to `teardown` of one fit, and what it does in the fit's hooks.

`FitSession` is for an algorithm that needs nothing but its turn after an optimizer step. Sessions
of other algorithms derive from it: `local_weights` (ranks that train apart), `lockstep` (ranks that
exchange something in every step) and `domino_tp` (ranks that share a model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.ledger import END, VALIDATION, Ledger, StepMeans, Traffic
from lightning_commfree.lightning_internals import Patches, add_to_rows
from lightning_commfree.strategies.contracts import Between
from lightning_commfree.strategies.stopping import Stopping

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

B = TypeVar("B", bound=Between)


class FitSession(Generic[B]):
    """One fit of a strategy; its methods run in the order in which they stand here.

    Args:
        strategy: whose fit begins.
        between: its algorithm.
        stopping: when the fit stops.
        numel: numbers that the whole model trains.

    Raises:
        ValueError: the ranks have different algorithms; on all ranks.

    Attributes:
        between: the algorithm.
        log: the figures of the fit.
        computing: a training step is computed.
        accumulates: no optimizer step follows it.
    """

    trains_apart = False  # ranks exchange nothing at most steps
    computing = accumulates = False

    def __init__(
        self, strategy: ReplicaStrategy, between: B, stopping: Stopping, numel: int
    ) -> None:
        self.between: B = between
        self._strategy, self._stopping = strategy, stopping
        self._trainer, self._channels = strategy.module.trainer, strategy.channels
        check_agreement(self._world, between.fingerprint())

        traffic = Traffic.of(numel, strategy.world_size, *between.cycle())
        self.log = FitLog(
            self._trainer, strategy.ledger, traffic, between.figures, strategy.patches
        )
        stopping.sigterm.stops_after = self.stops_after

    def begin(self, resumed: bool) -> None:
        """Train from the next batch on; hooks may have written to the weights.

        Args:
            resumed: the algorithm has its own state back.
        """
        del resumed
        self._stopping.begin(self.trains_apart)

    def batch_begins(self) -> None:
        """A batch is here and has not been trained yet."""
        self._stopping.share_last_batch(self._channels.within)

    @contextmanager
    def training(self) -> Iterator[None]:
        """In the body a training step is computed."""
        self.computing = True
        try:
            yield
        finally:
            self.computing = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """In the body no optimizer step follows a training step."""
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    def after_backward(self, loss: Tensor) -> None:
        """The gradients of a batch with this loss are there."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Take an optimizer step in the body; the algorithm exchanges what is due after it.

        The one place that says what a step is: for everything behind it, algorithms and stopping,
        steps are how often this has run.
        """
        with self._stopping.explaining():
            # the ranks of a replica exchange gradients in the body
            within = self._channels.within.size > 1
            named = self._world.naming_lost("gradients", computing=True)
            with self.between.stepping(), named if within else nullcontext():
                yield
            if self.between.after_step(self._stopping.wanted):
                self._stopping.agree_in_step()
            self._stopping.step_done()
            self.after_step()
        self.log.after_step()

    def after_step(self) -> None:
        """All ranks have taken a step, and know whether they stop after it."""

    def stops_after(self) -> int | None:
        """Return the step after which all ranks know, at the latest, of a SIGTERM that comes now.

        None where it cannot be known. Here ranks exchange something in every step, and the one that
        runs may have sent its flags already.
        """
        return self._trainer.global_step + 2

    def validation_begins(self) -> None:
        """Lightning's hooks have run."""
        ledger = self._world.ledger
        self._phase_before, ledger.phase = ledger.phase, VALIDATION

    def validation_ends(self) -> None:
        """Lightning's hooks have run."""
        self._world.ledger.phase = self._phase_before
        if not self._trainer.sanity_checking:
            self._stopping.agree_here()

    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` finds in the module while that holds what a checkpoint shall hold."""
        return read()

    def check_save(self) -> None:
        """Refuse a checkpoint that would be useless; on all ranks."""

    def fit_ends(self) -> None:
        """No step follows."""

    def end(self) -> None:
        """Give back what the algorithm holds; after a failed fit too."""
        self._stopping.end()
        self.log.close()
        self.between.close()

    @property
    def _world(self) -> Channel:
        return self._channels.world


class OutsideOfFit(FitSession[Any]):
    """No fit runs: Lightning does what it does."""

    def __init__(self) -> None:
        """There is nothing to keep together."""

    @override
    def batch_begins(self) -> None:
        pass

    @override
    def validation_begins(self) -> None:
        pass

    @override
    def validation_ends(self) -> None:
        pass

    @override
    def end(self) -> None:
        pass


class FitLog:
    """The figures of one fit, in the rows that the Trainer's loggers get of the module's metrics.

    They are in those rows alone: `callback_metrics`, `logged_metrics` and what `validate` returns
    are the user's, and a logger is called when it would be called without them. A row that follows
    another one without a step between them has none. Those of the ledger are of training steps
    alone, without the start, validations, checkpoints and the last exchange, and means over the
    last whole cycles: as many as hold `log_every_n_steps`.

    Args:
        trainer: in its fit.
        ledger: of this rank.
        traffic: the forecast: after how many steps the same is sent again, and what DDP would send.
        more: the algorithm's own figures; asked for after a step, where they are wanted.
        patches: get what runs ahead of Lightning's method.

    Attributes:
        traffic: as given.
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
        self._last: dict[str, float] | None = None
        add_to_rows(trainer, patches, self._more_for)

    def after_step(self) -> None:
        """Count a step; from within `Strategy.optimizer_step`."""
        self._ledger.phase = END  # until the next step begins
        self._means.after_step()

    def figures(self) -> dict[str, float]:
        """Return the figures as of now, by name; when the fit is over those that came last."""
        if self._last is not None:
            return dict(self._last)
        return {**self._means.figures(), **self._more()} if self._means.steps else {}

    def close(self) -> None:
        """End it, with the fit; the figures stay."""
        self._last, self._more = self.figures(), dict

    def _more_for(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures for a row of the loggers, of whatever is trained or validated."""
        logs = self._trainer.loggers and self._trainer.training
        if not logs or self._means.steps == self._steps_in_rows:
            return {}
        self._steps_in_rows = self._means.steps
        return {name: figure for name, figure in self.figures().items() if name not in row}
