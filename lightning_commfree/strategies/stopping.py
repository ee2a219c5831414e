"""All ranks stop after the same step, whoever asks for it.

*Equal epochs*: every rank trains as many batches per epoch as the rank with the fewest. Lightning's
own limit of an epoch is lowered, so progress bars, schedulers and validations follow it. So all
ranks come to the same steps, validations, checkpoints and epoch ends, and nobody has to ask where
the others are.

*Wishes travel*: SIGTERM, or `trainer.should_stop` on one rank, is a wish to stop. It travels as a
flag with the next exchange (`wanted`), and all ranks stop when that exchange has landed
(`agree_in_step`). Where all ranks are at the same place anyway, after a validation, at the end of
an epoch and before a checkpoint, they agree at once (`agree_here`). For SIGTERM:

1. Step 101: rank 1 receives SIGTERM and notes it. Nobody else knows; everybody trains.
2. Step 125: a fragment leaves; rank 1's header has the flag.
3. Step 126: the fragment lands on all ranks. All tell their Trainer that SIGTERM was received;
   Lightning raises `SIGTERMException` after this step, runs the `on_exception` hooks, which save
   what they would save, and tears down.

Lightning (2.5.2 and later) broadcasts a flag from rank 0 before every batch instead: a round trip
per batch on a slow link. The delay here is at most a launch interval plus the overlap, and in the
first cycle, before the first launch, a whole cycle plus the overlap. A scheduler's grace period
must be longer than that.

*Streams* have no length, so their ranks cannot agree on one in advance:

- Ranks that exchange something in every batch or step say with it that their data end
  (`share_last_batch`, `end_epoch`). The epoch ends on all of them with the first rank's data.
- Ranks that train apart cannot say it in time. If their data end after different steps, all raise
  an error that names the rank (`comm.stream_ends`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.stream_ends import StreamEnds
from lightning_commfree.lightning_internals import (
    Patches,
    data_used_up,
    end_epoch_after_this_batch,
    handle_signals,
    has_no_batch,
    is_last_batch,
    limit_epochs,
    may_stop_early,
    tell_sigterm,
)

if TYPE_CHECKING:
    from lightning_commfree.strategies.ranks import Ranks

TAG = "last_batch"
_SHOWN = 20  # ranks in a message
log = logging.getLogger(__name__)


class Stopping:
    """When a fit stops, on all of its ranks.

    It is made before the optimizers are: a scheduler may be made for as many steps as the Trainer
    estimates, which depends on the length of an epoch.

    Args:
        trainer: of the fit.
        ranks: all of them.
        patches: get what runs around the methods of Lightning's loops.

    Attributes:
        sigterm: SIGTERM on this rank.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, patches: Patches) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._several = trainer.world_size > 1  # a single rank has nobody to agree with
        self._wish = self._agreed = self._trains = False
        self._unsized = self._uneven_said = False
        self._step = 0
        self._streams: StreamEnds | None = None
        self.sigterm = DeferredSigterm(trainer, patches)
        if self._several:
            self._follow_loops(patches)

    # -- the moments of a fit

    def begin(self, trains_apart: bool) -> None:
        """Train from the next batch on.

        Args:
            trains_apart: ranks exchange nothing at most steps, and cannot say that their data end.
        """
        self._trains, self._step = True, self._trainer.global_step
        if trains_apart and self._unsized and self._several:
            self._streams = self._ranks.stream_ends()

    def step_done(self) -> None:
        """Count an optimizer step; in it.

        Raises:
            StreamEndsError: the stream of some rank has ended in an earlier step.
        """
        self._step += 1
        if self._streams is not None:
            self._streams.advance(self._epoch, self._step)

    def end(self) -> None:
        """The fit is over, or has failed."""
        self._trains = False
        if self._streams is not None:
            self._streams.close()
            self._streams = None

    # -- wishes

    @property
    def wanted(self) -> bool:
        """Whether this rank wants all to stop; to be sent with the next exchange."""
        return self._wish or self.sigterm.requested

    def agree_in_step(self) -> None:
        """Stop after the step that runs: its exchange had the wish of some rank. On all ranks."""
        if self._several:
            self._agree(self._trainer.global_step + 1)

    def agree_here(self) -> None:
        """Stop here if some rank wants to; collective, where all ranks are."""
        if self._trains and self._several and not stopped_by_hand(self._trainer.lightning_module):
            self._hold()
            self._agree(self._trainer.global_step)

    def no_step_follows(self, in_step: bool = False) -> bool:
        """Return whether the latest optimizer step is the last one, as far as it can be known now.

        `Strategy.on_train_end` is the last hook of a fit: callbacks have validated and written
        their last checkpoint by then. What must be in that checkpoint has to happen before, so the
        end is foreseen wherever it can be. Lightning decides it in nested loops; here is the same
        decision at one moment.

        Args:
            in_step: it runs, and the Trainer has not counted it yet.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        if trainer.max_steps != -1 and trainer.global_step + in_step >= trainer.max_steps:
            return True
        # a `should_stop` of this rank alone is a wish that the others do not know yet
        stops = self._agreed if self._several else trainer.should_stop
        if stops and may_stop_early(trainer, in_step):
            return True
        epoch: Any = loop.epoch_progress.current
        if loop.max_epochs in (None, -1):
            return False
        if epoch.started < epoch.ready:  # it begins; the counter of batches is the last epoch's
            return False
        if in_step:  # within an epoch, which is processed when it has run through
            return epoch.processed >= loop.max_epochs - 1 and data_used_up(trainer)
        # `ready` counts the epochs that were begun; a fit resumed at an epoch's end counts one few
        return epoch.ready >= loop.max_epochs and (
            epoch.processed >= loop.max_epochs or data_used_up(trainer)
        )

    # -- streams

    @property
    def stream_ends(self) -> bool:
        """Whether this rank's stream ends with the latest batch."""
        return self._unsized and is_last_batch(self._trainer)

    def share_last_batch(self, channel: Channel) -> None:
        """Let the epoch end with this batch if the stream of some rank does; before it is trained.

        For ranks that need each other in every batch.

        Args:
            channel: to these ranks.
        """
        if not self._unsized or channel.size == 1:
            return
        mine = torch.tensor([is_last_batch(self._trainer)], dtype=torch.uint8)
        last = channel.all_gather(mine.to(channel.device), TAG).wait().flatten().tolist()
        self._end_epoch([r for r, ends in zip(channel.ranks, last, strict=True) if ends], len(last))

    def end_epoch(self) -> None:
        """End the epoch: with the step that runs the stream of some rank ends. On all ranks."""
        last = self._ranks.all_values(int(self.stream_ends))
        self._end_epoch([rank for rank, ends in enumerate(last) if ends], len(last))

    def check_streams_end(self) -> None:
        """Check, where this rank's stream has ended, that those of all ranks that train apart have.

        Raises:
            StreamEndsError: some have ended after other steps.
        """
        if self._streams is not None and not self._trainer.received_sigterm:
            self._streams.end(self._epoch, self._step)

    def explaining(self) -> AbstractContextManager[None]:
        """In the body an exchange may fail because streams have ended after different steps."""
        return nullcontext() if self._streams is None else self._streams.explaining()

    # -- inside

    def _follow_loops(self, patches: Patches) -> None:
        """Run this object's parts around Lightning's loops, for which it has no hook.

        In the order in which Lightning calls the methods. Other code in this package that patches
        the same methods (`EpochStart`) was there before, so it runs inside these.
        """
        fit = self._trainer.fit_loop
        set_up, start = fit.setup_data, fit.epoch_loop.on_run_start
        end_batch, end_epoch = fit.epoch_loop.on_advance_end, fit.on_advance_end

        def set_up_equally() -> None:
            before = fit._combined_loader
            set_up()
            if fit._combined_loader is not before:  # made, or reloaded
                self._equalize()

        def start_together(*args: Any) -> None:
            start(*args)
            self._check_first_batch()
            self._hold()  # else Lightning would end the epoch on this rank alone

        def end_batch_together(*args: Any) -> None:
            if self.stream_ends:
                self.check_streams_end()  # a validation follows, to which all ranks must come
            self._hold()  # else Lightning would validate on this rank alone
            end_batch(*args)

        def end_epoch_together() -> None:
            if self._unsized:
                self.check_streams_end()
            end_epoch()
            self.agree_here()
            if self._trainer.received_sigterm:  # as Lightning ends `on_advance_end`
                raise SIGTERMException

        patches.put(fit, "setup_data", set_up_equally)
        patches.put(fit.epoch_loop, "on_run_start", start_together)
        patches.put(fit.epoch_loop, "on_advance_end", end_batch_together)
        patches.put(fit, "on_advance_end", end_epoch_together)

    @property
    def _epoch(self) -> int:
        return self._trainer.fit_loop.epoch_progress.current.ready - 1

    def _equalize(self) -> None:
        """Lower this rank's batches of an epoch to those of the rank with the fewest."""
        mine = self._trainer.fit_loop.max_batches
        counts = self._ranks.all_values(-1 if math.isinf(mine) else int(mine))
        sized = [count for count in counts if count >= 0]
        self._unsized = not sized
        if self._unsized or len(set(counts)) == 1:
            return
        least = min(sized)
        limit_epochs(self._trainer, least)
        if self._uneven_said:  # of the same loaders, before they were reloaded
            return
        self._uneven_said = True
        shortest = counts.index(least)
        others = [(r, f"{n - least}" if n >= 0 else "the rest") for r, n in enumerate(counts)]
        left_out = [f"rank {rank} leaves out {some}" for rank, some in others if some != "0"]
        more = ", ..." if len(left_out) > _SHOWN else ""
        rank_zero_warn(
            f"Rank {shortest} has the fewest training batches, {least} per epoch, and all ranks"
            f" train as many: {', '.join(left_out[:_SHOWN])}{more}. Give all ranks equally many"
            " batches to train on all of them."
        )

    def _check_first_batch(self) -> None:
        """Check that the streams of all ranks have a batch in this epoch, or that none has.

        Raises:
            RuntimeError: some have none; on all ranks.
        """
        if not self._unsized:
            return
        empty = self._ranks.all_values(int(has_no_batch(self._trainer)))
        if 0 < sum(empty) < len(empty):
            without = [rank for rank, none in enumerate(empty) if none]
            raise RuntimeError(
                f"{_named(without)} got no training batch in epoch {self._epoch}, and the other"
                " ranks did. Give all ranks equally many batches."
            )

    def _end_epoch(self, last: list[int], size: int) -> None:
        if not last:
            return
        end_epoch_after_this_batch(self._trainer)
        if len(last) < size and not self._uneven_said:
            self._uneven_said = True
            rank_zero_warn(
                f"The data of {_named(last).lower()} ended with batch"
                f" {self._trainer.fit_loop.epoch_loop.batch_idx} of epoch {self._epoch}: the epoch"
                " ends there on all ranks, and so will later ones where some rank's data end."
                " Give all ranks equally many batches to train on all of them."
            )

    def _hold(self) -> None:
        """Turn `trainer.should_stop` of this rank alone into a wish."""
        trainer = self._trainer
        if trainer.should_stop and not self._agreed and may_stop_early(trainer):
            self._wish, trainer.should_stop = True, False

    def _agree(self, step: int) -> None:
        """Stop after `step` if some rank wants to; collective over all ranks."""
        if self._agreed:
            return
        said = self._ranks.all_values(self._wish + 2 * self.sigterm.requested)
        if any(word & 2 for word in said):
            self.sigterm.agree()
            return
        wishes = [rank for rank, word in enumerate(said) if word]
        if not wishes:
            return
        self._agreed = self._trainer.should_stop = True
        if len(wishes) < len(said):
            rank_zero_warn(
                f"{_named(wishes)} wanted to stop (`trainer.should_stop`) and the others did not:"
                f" all ranks stop after step {step}, with the same weights. Decide on something"
                " that is the same on all ranks, such as a metric logged with `sync_dist=True`."
            )


def _named(ranks: list[int]) -> str:
    """Return ranks for the beginning of a sentence: "Rank 1", "Ranks 1, 2"."""
    names = ", ".join(map(str, ranks[:_SHOWN])) + (" and others" if len(ranks) > _SHOWN else "")
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {names}"


# -- SIGTERM and Ctrl-C


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
        patches: get what runs in place of Lightning's methods.

    Attributes:
        requested: this rank has received SIGTERM.
        stops_after: returns the step after which all ranks will know of one that comes now; None:
            it cannot be known.
    """

    def __init__(self, trainer: pl.Trainer, patches: Patches) -> None:
        self.requested = self._has_said = False
        self.stops_after: Callable[[], int | None] = lambda: None
        self._trainer = trainer
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
        done, last = self._trainer.global_step, self.stops_after()
        if last is None:
            return f"after their next exchange ({done} steps are done)"
        if self._trainer.max_steps != -1:
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
