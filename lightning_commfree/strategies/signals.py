"""SIGTERM and Ctrl-C, which come to one rank and concern all of them.

*SIGTERM* is a wish to stop (`stopping`), which travels with the next exchange:

1. Step 101: rank 1 receives SIGTERM and notes it. Nobody else knows; everybody trains.
2. Step 125: a fragment leaves; rank 1's header has the flag.
3. Step 126: the fragment lands on all ranks. All tell their Trainer that SIGTERM was received;
   Lightning raises `SIGTERMException` after this step, runs the `on_exception` hooks, which save
   what they would save, and tears down.

Lightning (2.5.2 and later) broadcasts a flag from rank 0 before every batch instead: a round trip
per batch on a slow link. The delay here is at most a launch interval plus the overlap, and in the
first cycle, before the first launch, a whole cycle plus the overlap. A scheduler's grace period
must be longer than that. The terminal says after which step all will have stopped.

*Ctrl-C* stops every rank where it is, each in another step, so that no checkpoint can be made of
them any more (`stopped_by_hand`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.lightning_internals import Patches, handle_signals, tell_sigterm
from lightning_commfree.strategies.clock import Clock

log = logging.getLogger(__name__)


def stopped_by_hand(module: pl.LightningModule | None) -> bool:
    """Return whether a callback saves because of Ctrl-C, which stopped each rank where it was.

    What a rank waits for then may never be sent, and its values are of another step than those of
    the others.

    Args:
        module: of the Trainer; after a launch, in the launching process, it has none.
    """
    if module is None or not isinstance(sys.exc_info()[1], KeyboardInterrupt):
        return False
    try:
        trainer = module.trainer
    except RuntimeError:
        return False
    return trainer.state.status == TrainerStatus.INTERRUPTED and trainer.world_size > 1


def warn_unsaved() -> None:
    """Say that Ctrl-C leaves no checkpoint."""
    rank_zero_warn(
        "No checkpoint is saved: Ctrl-C has stopped the ranks in the middle of different steps."
        " Earlier checkpoints are as they were. To stop with one, send SIGTERM, which all ranks"
        " follow after the same step."
    )


class DeferredSigterm:
    """SIGTERM on this rank, in place of Lightning's own agreement.

    SLURM's signal to requeue, on which Lightning would save from wherever each rank happens to be,
    in the middle of a step and of collectives, is handled like SIGTERM.

    It is made in the process that trains, before Lightning registers its signal handlers: in
    `Strategy.setup`. A single rank has nobody to ask and keeps Lightning's methods.

    Args:
        trainer: of the fit.
        clock: says what a step is.
        patches: get what runs in place of Lightning's methods.

    Attributes:
        requested: this rank has received SIGTERM.
        stops_after: returns the step after which all ranks will know of one that comes now; None:
            it cannot be known.
    """

    def __init__(self, trainer: pl.Trainer, clock: Clock, patches: Patches) -> None:
        self.requested = self._has_said = False
        self.stops_after: Callable[[], int | None] = lambda: None
        self._trainer, self._clock = trainer, clock
        if trainer.world_size > 1:
            handle_signals(trainer, patches, self._on_sigterm, self._on_requeue)

    def agree(self) -> None:
        """Tell the Trainer that SIGTERM was received; call it on all ranks after the same step."""
        if self._trainer.is_global_zero and not self._has_said:
            self._say("Another rank was asked to stop: all ranks stop together, after this step.")
        tell_sigterm(self._trainer)

    def _on_requeue(self, signum: int, frame: FrameType | None) -> None:
        """Handle SLURM's signal ahead of a time limit, on which Lightning would save at once."""
        if self._trainer.local_rank == 0 and not self.requested:
            _write_now(
                f"\nSignal {signum} is taken for SIGTERM, and callbacks save what they save on"
                " exceptions (`OnExceptionCheckpoint`). Lightning would have saved at once, in the"
                " middle of a step, and requeued the job: its script has to do that."
            )
        self._on_sigterm(signal.SIGTERM, frame)

    def _on_sigterm(self, signum: int, _: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = True
        log.info("[rank %d] Received SIGTERM.", self._trainer.global_rank)
        # once a machine; and a rank that leaves by an error ends the others of its machine so
        if self._trainer.local_rank == 0 and sys.exc_info()[1] is None:
            self._say(f"Asked to stop: all ranks stop together, {self._when()}.")
        launcher = self._trainer.strategy.launcher
        if launcher is not None:  # as Lightning does: for processes that this one launched
            launcher.kill(signum)

    def _when(self) -> str:
        done, last = self._clock.steps, self.stops_after()
        if last is None:
            return f"after their next exchange ({done} steps are done)"
        # `max_steps` counts the steps of every optimizer, which a batch may have several of
        if self._trainer.max_steps != -1 and not self._clock.spans_batch:
            last = min(last, self._trainer.max_steps)
        return f"after step {last} at the latest ({done} are done)"

    def _say(self, text: str) -> None:
        self._has_said = True
        _write_now(f"\n{text}\n")


def _write_now(text: str) -> None:
    """Write in a signal handler: not by `print`, which the signal may have interrupted."""
    try:
        file = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # in a notebook, whose output is no file
        file = 2
    with suppress(OSError):  # the terminal was closed
        os.write(file, text.encode())
