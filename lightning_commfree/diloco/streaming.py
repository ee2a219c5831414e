"""Streaming DiLoCo (arXiv:2501.18512, Algorithm 2), from one inner step to the next.

A replica trains on its own. For every fragment it also keeps the *global copy*: the parameters on
which all replicas last agreed. After an inner step, in this order:

1. *Launch* the fragments that are due: global copy minus local copy, in fp32, encoded once, on its
   way to every replica; training goes on.
2. *Land* the fragments that were launched `overlap_steps` ago: decode what all replicas sent,
   average in fp32, step the outer optimizer on the global copy, merge it into the local copy.

At the end of training, *finish*: land what is in flight, then one blocking round over every
fragment, which makes the plain mean of the replicas' local copies both copies of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.diloco.evaluation import Evaluation, LocalMean
from lightning_commfree.diloco.exchange import Arrival, Exchange, cheaper_exchanges
from lightning_commfree.diloco.finite import begin_anew, is_nonfinite, refuse_to_save, take_global
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.landing import Flight, Landing, receive, refuse_landing
from lightning_commfree.diloco.letter import Header
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.swap import Swap
from lightning_commfree.diloco.wire import WIRE_FORMATS, warm_up


class StreamingDiLoCo:
    """One replica's part of the algorithm.

    Args:
        module: the model that trains; all replicas hold the same weights now.
        fragments: a partition of its trainable parameters.
        settings: the knobs.
        channel: to the other replicas. One replica alone sends no bytes and is a Nesterov
            look-ahead optimizer.
        replica: channel to the other ranks of the same replica, whose gradients are averaged by
            whoever trains; None where a rank is a replica. Each of its k ranks holds 1/k of the
            outer state and exchanges it with its like in the other replicas; the methods are then
            called on all of them.

    Attributes:
        step: inner steps done, counted as attempts: one that a gradient scaler skips counts too.
        fragments: one `OuterFragment` per fragment.
        schedule: when they launch and land.
        landings: the latest `Landing` by fragment.
        optimizers: the inner ones, whose state is reset where a replica abstains.
        swap: puts the outer weights into the module for a while.
        means: how the mean of the local copies is formed, by fragment.
        evaluation: exchanges it for a validation.
        settings: as above.
    """

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None = None,
    ) -> None:
        self.fragments = [
            OuterFragment(module, f, settings.outer_optimizer, replica, settings.outer_device)
            for f in fragments
        ]
        self._replica = replica
        overlap_steps = 0 if settings.eager else int(settings.overlap_steps)
        self.schedule = Schedule(settings.sync_every, len(fragments), overlap_steps)
        self.step = 0
        self._module = module
        self._names = [fragment.parameters for fragment in fragments]
        self._exchanged = {name for fragment in fragments for name in fragment.parameters}
        self.landings: dict[int, Landing] = {}
        self.optimizers: Sequence[Optimizer] = ()
        self._channel = channel
        self._wire = WIRE_FORMATS[settings.wire_dtype]
        devices = {fragment.global_copy.device for fragment in self.fragments}
        devices |= {parameter.device for parameter in module.parameters()}
        for device in {*devices, channel.device}:  # a thread averages shards on the channel's
            warm_up(self._wire, device)
        self.settings = settings
        self._background = Background(channel.ledger)
        sizes = [(f.parameter_numel, f.shard_numel - f.parameter_numel) for f in self.fragments]
        self._exchanges = cheaper_exchanges(channel, self._background, self._wire, sizes)
        self._in_flight: dict[int, Flight] = {}  # by fragment, in the order of launch
        self.swap = Swap(self.fragments)
        self.means = self._make_means(sizes)
        self.evaluation = Evaluation(self.means, settings, channel, replica)

    @torch.no_grad()
    def after_inner_step(self, stop: bool = False) -> bool:
        """Count an inner step; launch and land what is due.

        Args:
            stop: whether this replica wants the training to stop; travels with what leaves now.

        Returns:
            Whether any replica wanted to stop when it launched what landed now: the same on all
            replicas.
        """
        assert not self.swap.is_in, "an inner step has trained the outer weights"
        self.step += 1
        self.evaluation.forget()
        launches = self.schedule.launched_at(self.step)
        if launches:
            self._check_trainable()
        return any(self._exchange(launches, stop))

    @torch.no_grad()
    def finish(self, stop: bool = False) -> bool:
        """Land what is in flight, then take the plain mean of the replicas' local weights.

        Global and local copies are that mean then, to the bit and on all replicas, averaged buffers
        too; a second call moves nothing. An outer step in its place would throw away most of what a
        short fit has learnt. One replica alone keeps its local weights.

        The differences to the global copies travel in the run's wire format, as at every launch:
        N/2 bytes in fp4. In fp32 the demo's validation loss is the same to 0.1 %.

        The outer momentum stays what it was, for it has no part in the mean: it is an average of
        former outer gradients, and where training goes on they still say where it was going.

        Returns:
            Whether any replica wants to stop, as `after_inner_step` does.
        """
        self._check_trainable()
        swapped = self.swap.is_in
        self.swap.put_back()
        stops = self._finish_rounds(stop)
        if swapped:
            self.swap.put_in()
        return any(stops)

    @torch.no_grad()
    def refuse_to_save(self, world: Channel) -> None:
        """See that a checkpoint would hold finite weights; see `finite.refuse_to_save`."""
        self.wait_in_flight()
        rule = self.settings.nonfinite
        refuse_to_save(self.fragments, self.swap.local, rule, self.step, world)

    def close(self) -> None:
        """End the thread of the exchanges; what is in flight is given up."""
        self._background.close()

    def outer_facts(self) -> dict[str, str]:
        """Return kind and settings of the outer optimizer, which all replicas must share."""
        optimizer, scheduler = self.fragments[0].optimizer, self.fragments[0].scheduler
        plain = (int, float, str, tuple, type(None))  # others show an address when printed
        defaults = {k: v for k, v in optimizer.defaults.items() if isinstance(v, plain)}
        scheduled = "" if scheduler is None else f" with {type(scheduler).__name__}"
        return {"outer_optimizer": f"{type(optimizer).__name__} {defaults}{scheduled}"}

    def wait_in_flight(self) -> None:
        """Take what is in flight off the wire; it still lands at its step."""
        for flight in self._in_flight.values():
            flight.pending.wait()

    @property
    def num_replicas(self) -> int:
        """M, this one included."""
        return self._channel.size

    @property
    def in_flight(self) -> list[int]:
        """The fragments that have been launched and not landed, in the order of launch."""
        return list(self._in_flight)

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that this replica sends in `sync_every` steps, in which every fragment leaves."""
        return sum(exchange.num_bytes for exchange in self._exchanges)

    @torch.no_grad()
    def differs_from_outer(self, buffers: bool = True) -> bool:
        """Return whether some local parameter, or buffer, is another one than its global copy."""
        return not all(fragment.is_local(buffers) for fragment in self.fragments)

    @torch.no_grad()
    def take_local(self) -> None:
        """Make what the module holds the global copy, before the first step."""
        for fragment in self.fragments:
            fragment.take_local()

    def state_dict(self) -> dict[str, Any]:
        """Return all that this replica needs to go on bit for bit, with nothing on the wire.

        What is in flight is waited for and stands in the state with its fragment; it lands at its
        step. The tensors are copies in host memory: a device need not hold everything twice.
        """
        return {
            "step": self.step,
            "local": [tensor.to("cpu", copy=True) for tensor in self.swap.local],
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "in_flight": {
                p: flight.pending.wait().to("cpu", copy=True)
                for p, flight in self._in_flight.items()
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: same fragments, same settings, same replicas."""
        assert not self._in_flight, "a state is loaded before the first step"
        assert not self.swap.is_in, "a state is loaded into the local copy"
        self.step = state["step"]
        for fragment, fragment_state in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(fragment_state)
        for tensor, saved in zip(self.swap.local, state["local"], strict=True):
            tensor.copy_(saved)
        self._in_flight = {
            p: Flight(self._exchanges[p], Pending.here(arrived), time.perf_counter())
            for p, arrived in state["in_flight"].items()
        }

    def _make_means(self, sizes: list[tuple[int, int]]) -> list[LocalMean]:
        """Return `means`; `sizes` as `cheaper_exchanges` takes them."""
        assert len(sizes) == len(self.fragments), "one for each"
        ways = zip(self.fragments, self._exchanges, strict=True)
        return [LocalMean(fragment, exchange, as_difference=True) for fragment, exchange in ways]

    def _exchange(self, launches: list[int], stop: bool) -> list[bool]:
        """Launch and land what is due; return for each landing whether a replica wants to stop."""
        for p in launches:
            self._launch(p, stop)
        # what `finish` has landed ahead of its step does not land again
        landings = [p for p in self.schedule.landed_at(self.step) if p in self._in_flight]
        return [self._land(p, self.settings.mix) for p in landings]

    def _finish_rounds(self, stop: bool) -> list[bool]:
        return self._land_in_flight() + [self._settle(p, stop) for p in range(len(self.fragments))]

    def _land_in_flight(self) -> list[bool]:
        return [self._land(p, self.settings.mix) for p in list(self._in_flight)]

    def _settle(self, p: int, stop: bool) -> bool:
        """Take the mean of a last round, which is an outer step of learning rate 1 as it were."""
        mean = self.means[p]
        digest = self._digest(p) if mean.as_difference else 0
        self._send(p, mean.exchange, mean.values(), Header(stop, self.step, digest))
        arrival = self._receive(p)
        self.fragments[p].settle(None if self._channel.size == 1 else mean.of(arrival.mean))
        self.landings[p] = self.landings[p]._replace(outer_lr=1.0)
        if self._channel.rank in arrival.nonfinite:
            self._begin_anew(p, [p])
        return arrival.stop

    def _launch(self, p: int, stop: bool) -> Tensor:
        gradient = self.fragments[p].outer_gradient()
        header = Header(stop, self.step, self._digest(p))
        return self._send(p, self._exchanges[p], gradient, header)

    def _send(self, p: int, exchange: Exchange, values: Tensor, header: Header) -> Tensor:
        """Launch the values; return whether they hold NaN or Inf: bool, no dimension."""
        assert p not in self._in_flight, f"fragment {p} is launched while it is in flight"
        nonfinite = is_nonfinite(self.fragments[p], values, self._replica)
        pending = exchange.launch(values, header._replace(nonfinite=nonfinite))
        self._in_flight[p] = Flight(exchange, pending, time.perf_counter())
        return nonfinite

    def _land(self, p: int, mix: float) -> bool:
        arrival = self._receive(p)
        self.fragments[p].outer_step(arrival.mean)
        self.fragments[p].average_buffers(arrival.mean)
        if self._channel.rank in arrival.nonfinite:
            self._begin_anew(p, take_global(self.fragments, p, self._replica))
        else:
            self.fragments[p].merge(mix)
        return arrival.stop

    def _begin_anew(self, p: int, taken: Sequence[int]) -> None:
        names = [name for q in taken for name in self._names[q]]
        parameters = map(self._module.get_parameter, names)
        begin_anew(self.optimizers, parameters, p, self.step, taken)

    def _receive(self, p: int) -> Arrival:
        flight, fragment = self._in_flight.pop(p), self.fragments[p]
        before_s = self._channel.ledger.seconds_waited
        flight.pending.wait()
        waited_s = self._channel.ledger.seconds_waited - before_s
        arrival = receive(flight, fragment.global_copy.device, self._replica)
        refuse_landing(arrival, p, self._names[p], self.step, self._channel, self.settings)
        lr = float(fragment.optimizer.param_groups[0]["lr"])
        self.landings[p] = Landing.of(arrival, flight, lr, waited_s, self.landings.get(p))
        return arrival

    def _digest(self, p: int) -> Tensor | int:
        """Return what travels with this launch: the global copy's hash where it is due, else 0."""
        every = self.settings.check_drift_every
        cycle = (self.step - self.schedule.offset(p)) // self.settings.sync_every
        if not every or cycle % every:
            return 0
        return self.fragments[p].digest()

    def _check_trainable(self) -> None:
        named = self._module.named_parameters()
        trainable = {name for name, parameter in named if parameter.requires_grad}
        if late := sorted(trainable - self._exchanged):
            raise RuntimeError(
                f"The parameters {late} became trainable after the fit had begun and belong to no"
                " fragment: every replica would train its own. Make them trainable before `fit`,"
                " or end the fit and begin another one."
            )
