"""How often the ranks of a fit meet decides how they stay together: the moments of a fit.

Three kinds: in every batch (`every_batch`), in every optimizer step (`every_step`), and rarely
(`rarely`), where replicas train apart. Each looks after the same three things: a checkpoint or a
validation holds what all ranks agree on; nobody waits for a rank that has ended; all ranks end
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.ledger import VALIDATION, Traffic
from lightning_commfree.resume.files import FilePath
from lightning_commfree.strategies.contracts import Between
from lightning_commfree.strategies.fit_log import FitLog
from lightning_commfree.strategies.signals import DeferredSigterm

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

B = TypeVar("B", bound=Between)


@dataclass(frozen=True)
class Fit(Generic[B]):
    """What lives from `setup` to `teardown` of a fit."""

    strategy: ReplicaStrategy
    trainer: pl.Trainer
    between: B
    channels: ReplicaChannels
    sigterm: DeferredSigterm
    log: FitLog

    @classmethod
    def begun(
        cls, trainer: pl.Trainer, strategy: ReplicaStrategy, between: B, numel: int
    ) -> Fit[B]:
        """Return a fit that begins, with what stands before Lightning's methods in it.

        Args:
            trainer: of the fit.
            strategy: its own.
            between: the algorithm.
            numel: numbers that the whole model trains.
        """
        patches = strategy.patches
        traffic = Traffic.of(numel, strategy.world_size, *between.cycle())
        log = FitLog(trainer, strategy.ledger, traffic, between.figures, patches)
        sigterm = DeferredSigterm(trainer, patches)
        return cls(strategy, trainer, between, strategy.channels, sigterm, log)

    @property
    def world(self) -> Channel:
        """To all ranks."""
        return self.channels.world


class Pace(Generic[B]):
    """The moments of a fit, in their order; here ranks that need nothing at any of them.

    Args:
        fit: whose ranks stay together.

    Raises:
        ValueError: the algorithms of the ranks are not alike; on all ranks.

    Attributes:
        between: the algorithm.
        computing: a training step is computed.
        accumulates: no optimizer step follows it.
    """

    computing = accumulates = False

    def __init__(self, fit: Fit[B]) -> None:
        check_agreement(fit.world, fit.between.fingerprint())
        self._fit = fit
        self.between: B = fit.between
        fit.sigterm.stops_after = self.stops_after

    def begin(self, resumed: bool) -> None:
        """Train from the next batch on; hooks may have written to the weights.

        Args:
            resumed: the algorithm has its own state back.
        """

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
    def stepping(self) -> Iterator[None]:
        """In the body an optimizer step is taken; the algorithm's part follows."""
        fit = self._fit
        within = fit.channels.within.size > 1  # there DDP exchanges gradients
        named = fit.world.naming_lost("gradients", computing=True) if within else nullcontext()
        with self.between.stepping(), named:
            yield
        if self._after_step(fit.sigterm.requested):
            fit.sigterm.agree()
        fit.log.after_step()

    def stops_after(self) -> int | None:
        """Return the step after which all ranks know, at the latest, of a SIGTERM that comes now.

        None where nobody can tell. Here ranks exchange in every step, and the one that runs may
        have sent its word already.
        """
        return self._fit.trainer.global_step + 2

    def validation_begins(self) -> None:
        """Lightning's hooks have run."""
        ledger = self._fit.world.ledger
        self._phase_before, ledger.phase = ledger.phase, VALIDATION

    def validation_ends(self) -> None:
        """Lightning's hooks have run."""
        self._fit.world.ledger.phase = self._phase_before

    def fit_ends(self) -> None:
        """No step follows."""

    def end(self) -> None:
        """Give back what the algorithm holds; after a failed fit too."""
        self._fit.log.close()
        self.between.close()

    # -- collectives and checkpoints of Lightning's

    def meets(self) -> bool:
        """Return whether the others come to the collective that this rank has come to."""
        return True

    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` finds in the module where that holds what a checkpoint shall."""
        return read()

    def may_save(self, checkpoint: Mapping[str, Any], filepath: FilePath) -> bool:
        """Return whether a checkpoint is written now; else it is when the fit ends."""
        del checkpoint, filepath
        return True

    def removes(self, filepath: FilePath) -> None:
        """A checkpoint is removed."""

    # -- inside

    def _after_step(self, stop: bool) -> bool:
        return self.between.after_step(stop)


class OutsideOfFit(Pace[Any]):
    """No fit runs: Lightning does what it does."""

    def __init__(self) -> None:
        """There is nothing to stay together for."""

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        yield

    @override
    def validation_begins(self) -> None:
        """No step's bytes are counted."""

    @override
    def validation_ends(self) -> None:
        """The same."""

    @override
    def end(self) -> None:
        """Nothing has begun."""
