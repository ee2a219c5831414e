"""SIGTERM and Ctrl-C: signals that reach single ranks but must stop all of them.

*SIGTERM* is a request to stop (`stopping`), which is sent with the next exchange. An example:

1. Step 101: rank 1 receives SIGTERM and records it. No other rank knows; all ranks train.
2. Step 125: a fragment is launched; rank 1's header has the stop flag.
3. Step 126: the fragment lands on all ranks. Each tells its Trainer that SIGTERM was received;
   after this step Lightning raises `SIGTERMException`, runs the `on_exception` hooks, which may
   save checkpoints, and tears down.

Lightning (2.5.2 and later) broadcasts a flag from rank 0 before every batch instead: a round trip
per batch on a slow link. The delay here is at most a launch interval plus the overlap, or in the
first cycle, before the first launch, a full cycle plus the overlap. A job scheduler's grace period
must be longer than that. The terminal shows the step after which all ranks will have stopped.

*Ctrl-C* stops the ranks immediately, in different steps, and so does an error on one of them. No
checkpoint can be saved any more (`stopped_apart`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.lightning_internals import Patches, handle_signals, set_sigterm_received
from lightning_commfree.strategies.clock import Clock

log = logging.getLogger(__name__)


def stopped_apart(module: pl.LightningModule | None) -> bool:
    """Return whether Ctrl-C or an error is ending the fit, so that a callback must not save.

    The ranks are in different steps then, and a collective may wait forever.
    """
    error = sys.exc_info()[1]
    if module is None or error is None or isinstance(error, SIGTERMException):
        return False
    try:
        trainer = module.trainer
    except RuntimeError:  # in the launching process the module is not attached to a Trainer
        return False
    # after the fit, when a script has caught the error, a save is its own business
    in_fit = trainer.state.stage is not None
    return in_fit and trainer.state.status == TrainerStatus.INTERRUPTED and trainer.world_size > 1


def save_on_sigterm_only(trainer: pl.Trainer, patches: Patches) -> None:
    """Let callbacks that save on exceptions do so only if all ranks stop after the same step.

    Otherwise nothing could be saved, but Lightning's `ModelCheckpoint` would report a file.
    """
    for callback in trainer.checkpoint_callbacks if trainer.world_size > 1 else []:
        saves = getattr(callback, "save_on_exception", False)  # Lightning 2.6 and later
        if saves or isinstance(callback, OnExceptionCheckpoint):
            patches.put(callback, "on_exception", partial(_unless_apart, callback.on_exception))


def _unless_apart(
    save: Callable[..., None], trainer: pl.Trainer, module: pl.LightningModule, error: BaseException
) -> None:
    if not stopped_apart(module):
        save(trainer, module, error)
    elif not isinstance(error, KeyboardInterrupt):  # of which the strategy warns
        warn_unsaved("an error has ended the fit, and the ranks may be in different steps")


def warn_unsaved(
    why: str = "Ctrl-C has stopped the ranks in the middle of different steps",
) -> None:
    """Warn that no checkpoint is saved after Ctrl-C or an error."""
    rank_zero_warn(
        f"No checkpoint is saved: {why}. Earlier checkpoints are unchanged. To stop with a"
        " checkpoint, send SIGTERM: all ranks then stop after the same step."
    )


class DeferredSigterm:
    """Handles SIGTERM on this rank; replaces Lightning's broadcast of SIGTERM.

    SLURM's requeue signal is handled like SIGTERM. Lightning would save immediately, in the middle
    of a step and of collectives.

    It must be created in the process that trains, before Lightning registers its signal handlers:
    in `Strategy.setup`. A job of one rank keeps Lightning's methods.

    Args:
        trainer: the Trainer of the fit.
        clock: step counter of the fit.
        patches: receives the replacements of Lightning's methods.

    Attributes:
        requested: whether this rank has received SIGTERM.
        stops_after: returns the step after which all ranks would know of a SIGTERM received now;
            None if unknown.
    """

    def __init__(self, trainer: pl.Trainer, clock: Clock, patches: Patches) -> None:
        self.requested = self._has_said = False
        self.stops_after: Callable[[], int | None] = lambda: None
        self._trainer, self._clock = trainer, clock
        if trainer.world_size > 1:
            handle_signals(trainer, patches, self._on_sigterm, self._on_requeue)

    def agree(self) -> None:
        """Tell the Trainer that SIGTERM was received; on all ranks, after the same step."""
        if self._trainer.is_global_zero and not self._has_said:
            self._say("Another rank received SIGTERM: all ranks stop together after this step.")
        set_sigterm_received(self._trainer)

    def _on_requeue(self, signum: int, frame: FrameType | None) -> None:
        """Handle SLURM's signal ahead of a time limit as SIGTERM."""
        if self._trainer.local_rank == 0 and not self.requested:
            _write_now(
                f"\nSignal {signum} is handled like SIGTERM: callbacks save what they save on"
                " exceptions (`OnExceptionCheckpoint`). The job is not requeued automatically, as"
                " Lightning would do: requeue it in the job script."
            )
        self._on_sigterm(signal.SIGTERM, frame)

    def _on_sigterm(self, signum: int, _: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = True
        log.info("[rank %d] Received SIGTERM.", self._trainer.global_rank)
        # one message per machine; none if SIGTERM comes from a failing rank that ends the others
        if self._trainer.local_rank == 0 and sys.exc_info()[1] is None:
            self._say(f"Received SIGTERM: all ranks stop together, {self._when()}.")
        launcher = self._trainer.strategy.launcher
        if launcher is not None:  # forward it to launched processes, as Lightning does
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
    """Write from a signal handler; `print` is not safe, because the signal may interrupt it."""
    try:
        file = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # in a notebook, stderr is not a file
        file = 2
    with suppress(OSError):  # the terminal may be closed
        os.write(file, text.encode())
