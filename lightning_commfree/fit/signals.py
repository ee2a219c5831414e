"""Handle SIGTERM, which may reach only some ranks but must stop all of them.

SIGTERM becomes a request to stop (`stopping`), which is sent with the next exchange. For example,
with Streaming DiLoCo:

1. Step 101: rank 1 receives SIGTERM and records it. The other ranks do not know yet; all ranks
   continue training.
2. Step 125: the next exchange starts (a fragment is *launched*); rank 1 sends the stop flag.
3. Step 126: its result is applied on all ranks (the fragment *lands*). Each rank tells its
   Trainer that SIGTERM was received; after this step Lightning raises `SIGTERMException`, runs the
   `on_exception` hooks, which may save checkpoints, and tears down.

Lightning itself (2.5.2 and later) broadcasts a flag from rank 0 before every batch, which would
cost a round trip per batch on a slow link. Here, the delay is at most a launch interval plus the
overlap, or a full cycle plus the overlap before the first launch. A job scheduler's grace period
must be longer. The terminal shows the step after which all ranks will have stopped.

SLURM's signal before a time limit (`#SBATCH --signal=USR1`) stops the ranks in the same way. After
that, Lightning's own handler saves a checkpoint and requeues the job.

Ctrl-C, or an error on one rank, stops the ranks at different steps, so no checkpoint can be saved
(`save_on_sigterm_only`).
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

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.fit.clock import Clock
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.host import OnExceptionCheckpoint, pl
from lightning_commfree.lightning_internals import Patches, handle_signals, set_sigterm_received

log = logging.getLogger(__name__)


def warn_unsaved(why: str) -> None:
    """Warn, at the end of a fit, that no checkpoint was saved."""
    rank_zero_warn(
        f"No checkpoint was saved: {why}. Earlier checkpoints are unchanged. To stop and save a"
        " checkpoint, send SIGTERM instead: all ranks then stop after the same step."
    )


def save_on_sigterm_only(trainer: pl.Trainer, ranks: Ranks, patches: Patches) -> None:
    """Prevent callbacks from saving on an exception unless all ranks stop after the same step.

    SIGTERM stops all ranks together. After any other exception, ranks may be at different steps, so
    nothing can be saved, but Lightning's `ModelCheckpoint` would still report a saved file.
    """
    for callback in trainer.checkpoint_callbacks if ranks.size > 1 else []:
        saves = getattr(callback, "save_on_exception", False)  # Lightning 2.6 and later
        if saves or isinstance(callback, OnExceptionCheckpoint):
            save = partial(_save_unless_interrupted, callback.on_exception, ranks)
            patches.put(callback, "on_exception", save)


def _save_unless_interrupted(
    save: Callable[..., None],
    ranks: Ranks,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    error: BaseException,
) -> None:
    """Run `save`, a callback's `on_exception`; if ranks may be at different steps, warn instead."""
    if not ranks.interrupted:
        save(trainer, module, error)
    elif not isinstance(error, KeyboardInterrupt):  # the strategy itself warns about Ctrl-C
        warn_unsaved("an error has ended the fit, and the ranks may be at different steps")


class DeferredSigterm:
    """Handler for SIGTERM and SLURM's requeue signal, which replaces Lightning's handlers.

    Create it before Lightning registers its signal handlers, in `Strategy.setup`, in the training
    process. A single-rank job keeps Lightning's handlers.
    """

    def __init__(self, trainer: pl.Trainer, clock: Clock, patches: Patches) -> None:
        self.requested = False  # whether this rank has received SIGTERM
        self.requeue_requested = False  # whether it has received SLURM's signal
        self._announced = False  # whether a message about the stop has been written
        # returns the step after which all ranks would stop if SIGTERM came now; None if unknown
        self.stops_after: Callable[[], int | None] = lambda: None
        self._trainer, self._clock = trainer, clock
        self._requeues = False  # whether to requeue the job, as agreed by all ranks
        self._save_and_requeue: Callable[..., None] = lambda *_: None
        if trainer.world_size > 1:
            self._save_and_requeue = handle_signals(
                trainer, patches, self._on_sigterm, self._on_requeue
            )

    def agree(self, requeues: bool = False) -> None:
        """Tell the Trainer that SIGTERM was received; call it on all ranks, after the same step.

        `requeues` is whether any rank has received SLURM's signal to requeue the job.
        """
        self._requeues = requeues
        if self._trainer.is_global_zero and not self._announced:
            self._announce(
                "Another rank was asked to stop: all ranks stop together after this step."
            )
        set_sigterm_received(self._trainer)

    def requeue(self) -> None:
        """Save a checkpoint and requeue the SLURM job, if the ranks have agreed to; collective.

        Call it when all ranks have stopped.
        """
        if self._requeues:
            self._requeues = False
            self._save_and_requeue(signal.SIGUSR1, None)

    def _on_requeue(self, signum: int, frame: FrameType | None) -> None:
        """Request a stop of all ranks as SIGTERM does; `requeue` then does what the signal asks."""
        # Lightning would save immediately, in the middle of a step and of collectives
        if self._trainer.local_rank == 0 and not self.requested:
            _write_now(f"\nReceived signal {signum} to save a checkpoint and requeue the job.")
        self.requeue_requested = True
        self._on_sigterm(signal.SIGTERM, frame)

    def _on_sigterm(self, signum: int, _: FrameType | None) -> None:
        """Note the request, tell the user, and forward the signal to launched processes."""
        if self.requested:
            return
        self.requested = True
        log.info("[rank %d] Received SIGTERM.", self._trainer.global_rank)
        # names no signal, because the recipes raise this one for Ctrl-C
        # one message per machine; none if a failing rank ends the others with SIGTERM
        if self._trainer.local_rank == 0 and sys.exc_info()[1] is None:
            self._announce(f"Asked to stop: all ranks stop together, {self._expected_stop()}.")
        launcher = self._trainer.strategy.launcher
        if launcher is not None:  # forward it to launched processes, as Lightning does
            launcher.kill(signum)

    def _expected_stop(self) -> str:
        """Return a text for the user: after which step all ranks will have stopped."""
        done, last = self._clock.steps, self.stops_after()
        if last is None:
            return f"after their next exchange ({done} steps are done)"
        # `max_steps` counts every optimizer's steps, of which a batch may have several
        if self._trainer.max_steps != -1 and not self._clock.spans_batch:
            last = min(last, self._trainer.max_steps)
        return f"after step {last} at the latest ({done} are done)"

    def _announce(self, text: str) -> None:
        """Write a text to stderr now, and note that the stop has been announced."""
        self._announced = True
        _write_now(f"\n{text}\n")


def _write_now(text: str) -> None:
    """Write text from a signal handler, where `print` is unsafe because it is not reentrant."""
    try:
        file = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # in a notebook, stderr is not a file
        file = 2
    with suppress(OSError):  # the terminal may be closed
        os.write(file, text.encode())
