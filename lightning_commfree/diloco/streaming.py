"""Streaming DiLoCo (arXiv:2501.18512, Algorithm 2), from one inner step to the next.

A replica trains on its own. For every fragment it also keeps the *global copy*: the parameters on
which all replicas last agreed. After an inner step, in this order:

1. *Launch* the fragments that are due: global copy minus local copy, in fp32, encoded once, on its
   way to every replica; training goes on.
2. *Land* the fragments that were launched `overlap_steps` ago: decode what all replicas sent,
   average in fp32, step the outer optimizer on the global copy, merge it into the local copy.

At the end of training, *finish*: land what is in flight, then one blocking round over every
fragment. It makes the plain mean of the replicas' local copies both copies of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco.fragment_exchange import Arrival
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.last_round import LastRound
from lightning_commfree.diloco.late_parameters import refuse_late
from lightning_commfree.diloco.message import Header
from lightning_commfree.diloco.nonfinite import take_global
from lightning_commfree.diloco.replica import Replica
from lightning_commfree.diloco.settings import DiLoCoSettings


class StreamingDiLoCo(Replica):
    """One replica's part of the algorithm.

    Args:
        module: the model that trains; all replicas hold the same weights now.
        fragments: a partition of its trainable parameters.
        settings: the knobs.
        channel: to the other replicas. One alone sends nothing: a Nesterov look-ahead optimizer.
        replica: channel to the other ranks of the same replica, which have the same gradients;
            None where a rank is a replica. Each of its k ranks holds 1/k of the outer state and
            exchanges it with its like in the other replicas; all of them call the methods.

    Attributes:
        step: inner steps done, counted as attempts: one that a gradient scaler skips counts too.
        fragments: one `OuterFragment` per fragment; what joins comes behind the others.
        schedule: when they launch and land.
        optimizers: the inner ones; a replica that abstains resets their state.
        weight_swap: puts the outer weights into the module for a while.
        means: how the mean of the local copies is formed; `evaluation` shows it to a validation.
        lands_first: what is due lands ahead of a step's launches, and not behind them.
        parted: the replicas' trainings have ended after different steps, or some would have gone
            on; the same on all, from the landing on at which they learn of it.
    """

    lands_first = False

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None = None,
    ) -> None:
        super().__init__(module, fragments, settings, channel, replica)
        self._last_round, self.parted = LastRound(self), False

    # -- what whoever trains calls

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take an inner step in the body; then call `after_step`.

        What has been thawed since the last step joins, for nobody has trained it yet. What thaws in
        the middle of a step is not seen in time, and refused after it.
        """
        if self._late_parameters.outside and (thawed := self._late_parameters.thawed()):
            if self.settings.replica_size > 1:
                self._refuse_late()
            with torch.no_grad():
                self._join(Fragment(tuple(thawed)), self.schedule.next_launch(self.step))
        yield

    @torch.no_grad()
    def after_step(self, stop: bool = False) -> bool:
        """Count an inner step; launch and land what is due.

        Args:
            stop: whether this replica wants the training to stop; travels with what leaves now.

        Returns:
            Whether any replica wanted to when it launched what landed now: the same on all.
        """
        assert not self.weight_swap.is_in, "an inner step has trained the outer weights"
        self.step += 1
        self.evaluation.latest = None

        launches = self.schedule.launched_at(self.step)
        if launches or (self._late_parameters.outside and self._late_parameters.thawed()):
            self._refuse_late()
        return any(self._exchange(launches, stop))

    @torch.no_grad()
    def finish(self, stop: bool = False, goes_on: bool = False) -> bool:
        """Land what is in flight, then take the plain mean of the replicas' local weights.

        Global and local copies are that mean then, to the bit and on all replicas, averaged buffers
        too; a second call moves nothing. One replica alone keeps its local weights. Where this
        replica ends before others it waits for them (`last_round`).

        The differences travel in the run's wire format: N/2 bytes in fp4. The outer momentum stays.

        Args:
            stop: as `after_step` takes it.
            goes_on: this replica would have trained on, without others that end.

        Returns:
            Whether any replica wants to stop, as `after_step` does.
        """
        self._refuse_late()
        with self.weight_swap.local_weights():
            return any(self._last_round.hold(stop, goes_on))

    @property
    def stops_after(self) -> int:
        """The step after which all replicas know of a wish to stop that comes now."""
        return self.schedule.next_launch(self.step) + self.lands_after

    # -- launches and landings

    @property
    def lands_after(self) -> int:
        """Steps from launch to landing."""
        return self.schedule.overlap_steps

    def launch(self, p: int, stop: bool) -> Tensor:
        """Launch a fragment; return whether its values hold NaN or Inf: bool, no dimension."""
        with record_function(f"launch fragment #{p}"):
            gradient = self.fragments[p].outer_gradient()
            header = self._header(p, stop, self._digest(p))
            return self._transfers.send(p, self._transfers.exchanges[p], gradient, header)

    def land(self, p: int) -> bool:
        """Land a fragment: outer step and merge; return whether a replica wanted to stop."""
        with record_function(f"land fragment #{p}"):
            arrival = self._receive(p)
            self.fragments[p].outer_step(arrival.mean)
            self.fragments[p].average_buffers(arrival.mean)

            if self._channel.rank in arrival.nonfinite:
                self._restart_from_global(p, take_global(self.fragments, p, self._replica))
            else:
                self.fragments[p].merge(self.settings.mix)
            return arrival.stop

    def land_in_flight(self) -> list[bool]:
        """Land what is in flight; return for each landing whether a replica wanted to stop."""
        return [self.land(p) for p in list(self._transfers.flights)]

    def settle(self, p: int, stop: bool) -> bool:
        """Exchange a fragment of the last round and take the mean; return as `land` does."""
        with record_function(f"launch fragment #{p}"):
            mean = self.means[p]
            header = self._header(p, stop, self._digest(p) if mean.as_difference else 0)
            self._transfers.send(p, mean.exchange, mean.values(), header)
        return self.settle_arrived(p)

    def settle_arrived(self, p: int) -> bool:
        """Take the mean of a fragment in flight; it is as an outer step of learning rate 1."""
        with record_function(f"land fragment #{p}"):
            arrival = self._receive(p)  # `means` may be others then: something may have joined
            self.means[p].settle(arrival.mean if self.num_replicas > 1 else None)
            self.landings[p] = self.landings[p]._replace(outer_lr=1.0)
            if self._channel.rank in arrival.nonfinite:
                self._restart_from_global(p, [p])
            return arrival.stop

    def give_up(self, p: int) -> bool:
        """Receive a fragment in flight and use nothing of it; return as `land` does."""
        return self._receive(p).stop

    # -- inside

    def _exchange(self, launches: list[int], stop: bool) -> list[bool]:
        """Launch and land what is due; return for each landing whether a replica wants to stop."""
        for p in launches:
            self.launch(p, stop)
        flights = self._transfers.flights  # `finish` may have landed some ahead of their step
        return [self.land(p) for p in self.schedule.landed_at(self.step) if p in flights]

    def _receive(self, p: int) -> Arrival:
        arrival, flight = self._transfers.receive(p, self.step)
        if max(arrival.ended) >= 0:
            self._last_round.note(flight.step, arrival.ended)
        if arrival.late_differs:
            self._average_moved()
        return arrival

    def _header(self, p: int, stop: bool, digest: Tensor | int) -> Header:
        header = Header(stop, self.step, digest, ended=self._last_round.notice)
        late = self._late_parameters
        if not (late.outside or late.joined):
            return header
        return header._replace(late_digest=late.digest(p == 0 and self.num_replicas > 1))

    def _digest(self, p: int) -> Tensor | int:
        """Return what travels with this launch: the global copy's hash where it is due, else 0."""
        every = self.settings.check_drift_every
        cycle = (self.step - self.schedule.offset(p)) // self.settings.sync_every
        if not every or cycle % every:
            return 0
        return self.fragments[p].digest()

    def _refuse_late(self) -> None:
        """See that all that is trained stands in a fragment."""
        held = {name for fragment in self.fragments for name in fragment.fragment.parameters}
        named = self._module.named_parameters()
        if late := [name for name, p in named if p.requires_grad and name not in held]:
            refuse_late(late, self.settings.replica_size)

    def _average_moved(self) -> None:
        """Find out what stands in no fragment and differs; let it join, and average it at once."""
        background = self._transfers.background
        if moved := self._late_parameters.moved(self._channel, background, self._replica):
            p = self._join(Fragment((), tuple(moved)), self.step)
            self.fragments[p].global_copy.zero_()  # what it holds is this replica's own
            values = self.fragments[p].outer_gradient()
            header = self._header(p, stop=False, digest=0)._replace(ended=None)
            self._transfers.send(p, self._transfers.exchanges[p], values, header)
            self.land(p)
