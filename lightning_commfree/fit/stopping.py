"""Stop all ranks after the same step, whichever rank requests it.

*Equal epochs*: every rank trains on as many batches per epoch as the rank with the fewest.
Lightning's own limit on batches is lowered, so progress bars, schedulers and validation follow it,
and all ranks reach validations, checkpoints and epoch ends after the same steps. Before each of
these, they wait for each other and check that they are at the same step (`meet`, `EpochEnds`).

*Requests*: SIGTERM, or `trainer.should_stop` on one rank, is a request to stop. It is sent with the
next exchange (`comm.requests`), and all ranks stop when that exchange has landed
(`follow_requests`). When all ranks are at the same point anyway (after validation, at the end of an
epoch and, where replicas drift apart, before a save), they agree immediately on `should_stop`
(`agree_here`). SIGTERM takes effect only after the next step: at these points Lightning would exit
the fit without calling another hook, but callbacks that save on SIGTERM expect `on_train_batch_end`
first.

*Streams* have no length to agree on in advance. Ranks that communicate on every batch or step also
report whether their data has run out (`share_last_batch`, `end_epoch`), and the epoch ends on all
of them as soon as any rank runs out. Ranks that train independently cannot report it in time. If
their data ends after different steps, all ranks raise an error that names the rank (`EpochEnds`).
The same happens if a loader yields fewer batches than its length, or a hook ends the epoch on only
some ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.liveness import PeerWatch
from lightning_commfree.comm.requests import STOP, STREAM_ENDS, Requests
from lightning_commfree.fit.clock import Clock
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.fit.signals import DeferredSigterm
from lightning_commfree.host import SIGTERMException, pl
from lightning_commfree.lightning_internals import (
    EPOCHS,
    Patches,
    data_fetcher,
    data_used_up,
    end_epoch_after_this_batch,
    has_no_batch,
    is_last_batch,
    limit_epochs,
    may_stop_early,
)

TAG = "last_batch"
_SHOWN = 20  # ranks in a message
_LEFT_OUT = (
    "`optimizer_step` or a hook probably left out a step on only some ranks. Leave it out on all"
    " ranks or on none. Call `trainer.save_checkpoint` on all ranks after the same step."
)


class Stopping:
    """Decides when to stop a fit, with the same result on all ranks.

    Create it before the optimizers: a scheduler may need the number of steps that the Trainer
    estimates, which depends on the length of an epoch. Elastic replicas override parts of it
    (`elastic/strategy.py`: `_ElasticStopping`): SIGTERM then stops only this replica.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, clock: Clock, patches: Patches) -> None:
        self._trainer, self._ranks, self.clock = trainer, ranks, clock
        self._several = trainer.world_size > 1  # a single rank has no others to agree with
        self._requested = self._agreed = self._trains = False
        self._unsized = self._warned_uneven = self._independent_streams = False
        self._step = 0  # number of steps begun, or of batches if a step spans one
        self._ends = EpochEnds(PeerWatch())  # compares nothing until `begin` replaces it
        self._first_to_end: int | None = None  # the rank whose data has ended the current epoch
        self._exchanges_every_step = False
        self.sigterm = DeferredSigterm(trainer, clock, patches)
        self.requests = Requests(self._outgoing)
        if self._several:
            self._follow_loops(patches)

    # -- called as a fit proceeds

    def begin(self, trains_independently: bool, exchanges_every_step: bool) -> None:
        """Start to agree on stops and to compare epoch ends; called before the first step.

        `trains_independently` is whether ranks skip communication in most steps, so that they
        cannot report the end of their data; `exchanges_every_step` is whether every step's exchange
        contains their requests, and so reports it.
        """
        self._exchanges_every_step = exchanges_every_step
        self._trains, self._step = True, self._trainer.global_step
        if self._several:
            self._independent_streams = trains_independently and self._unsized
            self._ends = EpochEnds(self._ranks.channels.world.peers)

    def step_begins(self) -> None:
        """Count a step; raise an `AgreedError` if a rank's epoch ended after an earlier step."""
        self._step += 1
        self._ends.step_begins(self._epoch_begun, self._step)

    def batch_ends(self, stepped: bool) -> None:
        """Announce whether any optimizer has stepped in a batch, with manual optimization."""
        self._ends.batch_ends(stepped)

    # -- requests to stop

    @property
    def wanted(self) -> bool:
        """Whether this rank requests a stop."""
        return self._requested or self.sigterm.requested

    def _outgoing(self) -> int:
        """Return this rank's request bits (`comm.requests`) for the next exchange."""
        ends = self._exchanges_every_step and self.stream_ends
        return STOP * self.wanted + STREAM_ENDS * ends

    def follow_requests(self) -> None:
        """Do what the exchanges that have landed request; collective if they request anything."""
        landed = self.requests.take()
        if landed & STOP:
            self.agree_after_step()
        if landed & STREAM_ENDS:
            self.end_epoch()

    def agree_after_step(self) -> None:
        """Stop all ranks after the current step, if any rank requests it; collective."""
        if self._several:
            sigterm = self.sigterm
            bits = self._requested + 2 * sigterm.requested + 4 * sigterm.requeue_requested
            self._agree(bits)

    def agree_here(self) -> None:
        """Stop all ranks now if any has requested a stop other than by SIGTERM; collective."""
        if self._trains and self._several and not self._ranks.interrupted:
            self._defer_stop()
            self._agree(int(self._requested))

    def meet(self, event: str) -> None:
        """Wait for all ranks; raise an `AgreedError` if they are at different steps; collective.

        Called before other collectives. `event` is the beginning of a sentence, such as
        "A checkpoint was saved".
        """
        ranks = self._ranks
        if not self._trains or ranks.size == 1 or ranks.interrupted:
            return
        self._ends.together(self._step, event, _LEFT_OUT)
        # not the batches: with gradient accumulation, the last step of a stream may have fewer
        steps = ranks.all_values(self.clock.steps)
        if len({*steps}) > 1:
            found = [f"rank {rank} has taken {n} steps" for rank, n in enumerate(steps[:_SHOWN])]
            raise ranks.channels.world.peers.agreed(
                f"The ranks are at different steps: {', '.join(found)}. {_LEFT_OUT}"
            )

    def no_step_follows(self, during_step: bool = False) -> bool:
        """Return whether the latest step is known to be the last one of the fit.

        With `during_step`, the step is still running, so the Trainer has not fully counted it.
        """
        # When Lightning calls the last hook of a fit (`on_train_end`), callbacks have already
        # written their last checkpoint. So the end is predicted here, by the same rules as in
        # Lightning's loops.
        trainer, loop = self._trainer, self._trainer.fit_loop
        uncounted = self.clock.uncounted if during_step else 0
        if self._exiting_by_sigterm:
            return False
        if trainer.max_steps != -1 and trainer.global_step + uncounted >= trainer.max_steps:
            return True
        # `should_stop` on only this rank is a request, which other ranks do not know yet
        stops = self._agreed if self._several else trainer.should_stop
        if stops and may_stop_early(trainer, uncounted):
            return True
        epoch: Any = loop.epoch_progress.current
        if loop.max_epochs in (None, -1):
            return False
        if epoch.started < epoch.ready:  # just beginning; the batch counter is the previous epoch's
            return False
        if during_step:  # the current epoch is not counted as processed yet
            return epoch.processed >= loop.max_epochs - 1 and data_used_up(trainer)
        # `ready` counts the epochs begun; a fit resumed at an epoch's end counts one too few
        return epoch.ready >= loop.max_epochs and (
            epoch.processed >= loop.max_epochs or data_used_up(trainer)
        )

    # -- streams

    @property
    def stream_ends(self) -> bool:
        """Whether this rank's stream ends with the latest batch."""
        return self._unsized and is_last_batch(self._trainer)

    def share_last_batch(self, channel: Channel) -> None:
        """End the epoch after this batch if it is the last one of any rank's stream; collective.

        Call it before training on the batch. `channel` connects the ranks that communicate on every
        batch.
        """
        if not self._unsized or channel.size == 1:
            return
        mine = torch.tensor([is_last_batch(self._trainer)], dtype=torch.uint8)
        last = channel.all_gather(mine.to(channel.device), TAG).wait().flatten().tolist()
        self._end_epoch_after(
            [r for r, ends in zip(channel.ranks, last, strict=True) if ends], len(last)
        )

    def end_epoch(self) -> None:
        """If any rank's stream ends in the current step, end the epoch on all ranks; collective."""
        last = self._ranks.all_values(int(self.stream_ends))
        self._end_epoch_after([rank for rank, ends in enumerate(last) if ends], len(last))

    def check_epoch_ends(self, out_of_data: bool = False) -> None:
        """Wait until all ranks end the epoch; raise an `AgreedError` if their steps differ."""
        self._ends.end(self._epoch_begun, self._step, out_of_data, self._first_to_end)

    def check_together(self, event: str, advice: str) -> None:
        """Wait for `event` on all ranks; raise an `AgreedError` if one takes a step without it."""
        self._ends.together(self._step, event, advice)

    def share_stream_end(self) -> None:
        """In the fit's last step, end the epoch on all ranks if it ends on any; collective.

        With `max_steps`, the last step may exhaust the streams of only some ranks, and Lightning
        would then run validation on those ranks only.
        """
        if self._independent_streams:
            self.check_epoch_ends()
            self.end_epoch()

    # -- inside

    def _follow_loops(self, patches: Patches) -> None:
        """Wrap methods of Lightning's loops at points where Lightning has no hook."""
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        if EPOCHS.works(self._trainer):
            patches.put(fit, "setup_data", partial(self._set_up_data, fit.setup_data))
        patches.put(epoch, "on_run_start", partial(self._start_epoch, epoch.on_run_start))
        patches.put(epoch, "on_advance_end", partial(self._finish_batch, epoch.on_advance_end))
        patches.put(fit, "on_advance_end", partial(self._finish_epoch, fit.on_advance_end))

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        """Run `set_up`, the loop's own `setup_data`; equalize epochs if it has created loaders."""
        before = data_fetcher(self._trainer)
        set_up()
        if data_fetcher(self._trainer) is not before:  # the loaders were created or reloaded
            self._equalize()

    def _start_epoch(self, start: Callable[..., None], *args: Any) -> None:
        """Run `start`, the loop's own `on_run_start`; check that all ranks have a batch."""
        self._first_to_end = None
        start(*args)
        self._check_first_batch()
        self._defer_stop()  # else Lightning would end the epoch on only this rank

    def _finish_batch(self, finish: Callable[..., None], *args: Any) -> None:
        """Run `finish`, the epoch loop's own `on_advance_end`, which ends a batch.

        `finish` may run validation, which all ranks must reach after the same step. So this first
        checks that streams end together, and defers a stop that only this rank may have requested.
        If SIGTERM has stopped ranks that train independently, it raises `SIGTERMException` instead.
        """
        if self._exiting_by_sigterm:
            raise SIGTERMException
        if self._independent_streams:
            if self.stream_ends:  # a validation follows, which all ranks must reach
                self.check_epoch_ends(out_of_data=True)
            else:
                self._ends.has_more(self._epoch_begun, self._step)
        self._defer_stop()  # else Lightning would validate on only this rank
        finish(*args)

    def _finish_epoch(self, finish: Callable[[], None]) -> None:
        """Run `finish`, the fit loop's own `on_advance_end`, which ends an epoch.

        First check that the epoch ends on all ranks after the same step. Afterwards, all ranks
        agree on whether to stop, because a hook that `finish` calls may have set
        `trainer.should_stop` on only some of them.
        """
        self.check_epoch_ends()
        finish()
        self.agree_here()
        if self._trainer.received_sigterm:  # Lightning's own check, repeated after `agree_here`
            raise SIGTERMException

    @property
    def _exiting_by_sigterm(self) -> bool:
        """Whether ranks that train independently exit after this step because of SIGTERM."""
        # Lightning would first validate where a stream ends, perhaps on only some ranks
        return self._independent_streams and self._trainer.received_sigterm

    @property
    def _epoch_begun(self) -> int:
        """Index of the epoch that began last, from 0; `current_epoch` counts those that ended."""
        return self._trainer.fit_loop.epoch_progress.current.ready - 1

    def _equalize(self) -> None:
        """Limit batches per epoch to the smallest number on any rank, and warn; collective."""
        mine = self._trainer.fit_loop.max_batches
        counts = self._ranks.all_values(-1 if math.isinf(mine) else int(mine))
        sized = [count for count in counts if count >= 0]
        self._unsized = not sized
        if self._unsized or len(set(counts)) == 1:
            return
        least = min(sized)
        limit_epochs(self._trainer, least)
        if self._warned_uneven:  # before the loaders were reloaded
            return
        self._warned_uneven = True
        shortest = counts.index(least)
        others = [(r, f"{n - least}" if n >= 0 else "the rest") for r, n in enumerate(counts)]
        left_out = [f"rank {rank} leaves out {some}" for rank, some in others if some != "0"]
        more = ", ..." if len(left_out) > _SHOWN else ""
        rank_zero_warn(
            f"Rank {shortest} has the fewest training batches ({least} per epoch), so every rank"
            f" trains on only that many: {', '.join(left_out[:_SHOWN])}{more}. To use all the data,"
            " give every rank the same number of batches."
        )

    def _check_first_batch(self) -> None:
        """Raise an error on all ranks if only some have a batch in this epoch; collective."""
        if not self._unsized:
            return
        empty = self._ranks.all_values(int(has_no_batch(self._trainer.fit_loop)))
        if 0 < sum(empty) < len(empty):
            without = [rank for rank, none in enumerate(empty) if none]
            raise RuntimeError(
                f"{_named(without)} got no training batches in epoch {self._epoch_begun}, but the"
                " other ranks did. Give every rank the same number of batches."
            )

    def _end_epoch_after(self, ended_ranks: list[int], num_ranks: int) -> None:
        """End the epoch after this batch if the data of any rank has ended, and warn."""
        if not ended_ranks:
            return
        end_epoch_after_this_batch(self._trainer)
        self._first_to_end = self._ranks.rank if self._ranks.rank in ended_ranks else ended_ranks[0]
        if len(ended_ranks) < num_ranks and not self._warned_uneven:
            self._warned_uneven = True
            rank_zero_warn(
                f"{_named(ended_ranks)} ran out of data at batch"
                f" {self._trainer.fit_loop.epoch_loop.batch_idx} of epoch {self._epoch_begun}, so"
                " the epoch ends there on all ranks. Later epochs will also end as soon as any rank"
                " runs out. To use all the data, give every rank the same number of batches."
            )

    def _defer_stop(self) -> None:
        """If `trainer.should_stop` is set without agreement, clear it and record a request."""
        trainer = self._trainer
        if trainer.should_stop and not self._agreed and may_stop_early(trainer):
            self._requested, trainer.should_stop = True, False

    def _agree(self, bits: int) -> None:
        """Stop after the step just taken if any rank's bits ask for it; collective over all ranks.

        Bit 0 of `bits` is set if this rank requests a stop, bit 1 if it received SIGTERM, and bit
        2 if it received SLURM's signal to requeue the job.
        """
        if self._agreed:
            return
        all_bits = self._ranks.all_values(bits)
        if any(bits & 2 for bits in all_bits):
            self.sigterm.agree(requeues=any(bits & 4 for bits in all_bits))
            return
        requesting = [rank for rank, bits in enumerate(all_bits) if bits]
        if not requesting:
            return
        self._agreed = self._trainer.should_stop = True
        if len(requesting) < len(all_bits):
            rank_zero_warn(
                f"{_named(requesting)} requested a stop (`trainer.should_stop`) but the other ranks"
                f" did not. All ranks are stopping after step {self.clock.steps} with the same"
                " weights. Base the decision on something that is the same on all ranks, such as a"
                " metric logged with `sync_dist=True`."
            )


def _named(ranks: list[int]) -> str:
    """Format ranks for the beginning of a sentence: "Rank 1", "Ranks 1, 2"."""
    names = ", ".join(map(str, ranks[:_SHOWN])) + (" and others" if len(ranks) > _SHOWN else "")
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {names}"


# An `EpochEnds` position is (epoch, steps begun, state, counts of the events in `together`). It
# only advances, so an old one is still valid.
_TRAINS = "trains"
_HAS_MORE = "has more"  # the rank is done with that step and has more data
_ENDED = "ended"
_STEPPED, _STOOD_STILL = "stepped", "stood still"  # in a batch, with manual optimization
# position of a rank that has not published one yet
_UNKNOWN: tuple[int, int, str, dict[str, int]] = (-1, 0, _TRAINS, {})


class EpochEnds:
    """Checks that every epoch ends after the same step on all ranks.

    A rank whose epoch ends early would deadlock: it would wait for the others at the end of the
    epoch while they wait for its next exchange. So every rank publishes its position with its
    heartbeats (`comm.liveness`):

    1. Rank 1's epoch ends after step 5. It waits and reads the other ranks' positions.
    2. It finds that rank 0 has begun step 6, sends an error that names both ranks to all ranks, and
       raises it.
    3. The other ranks read that error with their next heartbeat and raise it, in the exchange for
       which they are waiting or at their next step.

    If liveness is disabled, or there is no TCPStore, positions are not compared. Uneven epochs then
    make an exchange fail, at the latest after `timeout`, with an error that names no rank.
    """

    def __init__(self, watch: PeerWatch) -> None:
        self._watch = watch
        self._position: tuple[int, int, str] = _UNKNOWN[:3]
        self._events: Counter[str] = Counter()
        watch.publish(lambda: (*self._position, dict(self._events)))

    def step_begins(self, epoch: int, step: int) -> None:
        """Publish that this rank has begun a step; raise an `AgreedError` if an epoch ended before.

        Another rank has announced that error.
        """
        self._position = (epoch, step, _TRAINS)
        self._watch.check("step")

    def batch_ends(self, stepped: bool) -> None:
        """Announce whether any optimizer has stepped in the batch that has ended."""
        self._position = (*self._position[:2], _STEPPED if stepped else _STOOD_STILL)

    def has_more(self, epoch: int, step: int) -> None:
        """Announce that this rank has more data; validation may run before its next step."""
        self._position = (epoch, step, _HAS_MORE)

    def end(
        self,
        epoch: int,  # index, counted from 0
        step: int,  # number of steps in the fit so far
        out_of_data: bool = False,  # whether this rank has no more data; all ranks must have none
        first_to_end: int | None = None,  # another rank of this replica whose data ended first
    ) -> None:
        """Wait until all ranks have ended this epoch after the same step.

        Raise an `AgreedError` if a rank ends it after a different step, and a `PeerLostError` if a
        rank is lost or does not end it within the timeout.
        """
        self._position = (epoch, step, _ENDED)
        mine = self._watch.rank if first_to_end is None else first_to_end

        def why_waiting(positions: Mapping[int, Any]) -> dict[int, str]:
            """Return an error text per rank to wait for; raise if a rank continues the epoch."""
            found = {}
            for rank, position in positions.items():
                there, at, state, *_ = position or _UNKNOWN
                if there == epoch and at > step:
                    raise self._watch.agreed(_uneven(mine, rank, epoch, step, f"begun step {at}"))
                if there == epoch and out_of_data and (at, state) == (step, _HAS_MORE):
                    raise self._watch.agreed(_uneven(mine, rank, epoch, step, "more"))
                if there < epoch or (there == epoch and (at, state) != (step, _ENDED)):
                    found[rank] = (
                        f"has not reached the end of epoch {epoch}, which ended on rank {mine}"
                        f" after step {step}: it is slow or hung; if it is only slow, increase"
                        " `timeout`"
                    )
            return found

        self._watch.wait_for(why_waiting, "end of epoch")

    def together(self, step: int, event: str, advice: str) -> None:
        """Wait until `event` has happened on all ranks after the same step, as on this rank.

        If a rank has begun the next step without it, raise an `AgreedError`, in which `event`
        begins a sentence and `advice` follows. If a rank is lost, or does not begin that step
        within the timeout, raise a `PeerLostError`.
        """
        self._events[event] += 1
        count, mine = self._events[event], self._watch.rank

        def why_waiting(positions: Mapping[int, Any]) -> dict[int, str]:
            """Return an error text per rank to wait for; raise if a rank has passed the step."""
            found = {}
            for rank, position in positions.items():
                _, at, state, events = position or _UNKNOWN
                if events.get(event, 0) >= count:
                    continue
                # a rank that has stepped may already wait for this one in an exchange
                if at == step and {state, self._position[2]} == {_STEPPED, _STOOD_STILL}:
                    still = mine if state == _STEPPED else rank
                    raise self._watch.agreed(
                        f"Rank {still} took no optimizer step in batch {step}, but rank"
                        f" {rank if still == mine else mine} did. {_LEFT_OUT}"
                    )
                if at > step:
                    raise self._watch.agreed(
                        f"{event} on rank {mine} after step {step}; on rank {rank} that did not"
                        f" happen, and step {at} has begun there. {advice}"
                    )
                found[rank] = (
                    f"has not reached the point after step {step} where rank {mine} waits for it:"
                    " it is slow or hung; if it is only slow, increase `timeout`"
                )
            return found

        self._watch.wait_for(why_waiting, "hook")


def _uneven(rank: int, other: int, epoch: int, step: int, more: str) -> str:
    """Return the error text for an epoch that has ended on `rank` but not on rank `other`."""
    return (
        f"The data of rank {rank} ended after step {step}, in epoch {epoch}, and rank {other} has"
        f" {more}. Either its loader had fewer batches, or a hook ended its epoch"
        " (`on_train_batch_start` returned -1). Give every rank the same number of batches:"
        " limit them with `limit_train_batches`."
    )
