"""Streaming DiLoCo (arXiv:2501.18512, Algorithm 2), from one inner step to the next.

A replica trains on its own. For every fragment it also keeps the *global copy*: the parameters on
which all replicas last agreed. After an inner step, in this order:

1. *Launch* the fragments that are due: global copy minus local copy, in fp32, encoded once, on its
   way to every replica; training goes on.
2. *Land* the fragments that were launched `overlap_steps` ago: decode what all replicas sent,
   average in fp32, step the outer optimizer on the global copy, merge it into the local copy.

At the end of training, *finish*: land what is in flight, then one blocking round over every
fragment. It makes the plain mean of the replicas' local copies both copies of all of them.

A replica's fragments on their way: what leaves, what is in flight, what has arrived.

`streaming` says when they leave and land, and what becomes of what has arrived.

The plain mean of the replicas' local copies: at the end of a fit, and for a validation.

With `evaluate="mean"` a validation sees it in place of the outer weights, which in a short run are
the initial ones, or up to H steps old. Nothing is trained on it: global copies, outer optimizers,
local copies and what is in flight stay as they are.

What a fit says of exchanges: how many will come, and which weights none has moved yet.

One replica: its fragments, what it says of itself, and its state.

`streaming` trains it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.diloco.codec import WIRE_FORMATS, WireFormat, warm_up
from lightning_commfree.diloco.exchange import (
    TAG,
    Arrival,
    FragmentExchange,
    Header,
    cheaper_fragment_exchanges,
)
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.frozen import LateParameters, refuse_late
from lightning_commfree.diloco.nonfinite import (
    is_nonfinite,
    refuse_landing,
    refuse_to_save,
    restart_from_global,
    take_global,
)
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings, cuts_whole
from lightning_commfree.model.weight_swap import WeightSwap


class FragmentInFlight(NamedTuple):
    """A fragment that has been launched and not landed."""

    exchange: FragmentExchange
    pending: Pending[Tensor]
    launched_s: float  # on the clock of `time.perf_counter`
    step: int  # after which it was launched

    def receive(self, device: torch.device, replica: Channel | None) -> Arrival:
        """Wait for what all have sent and decode it; the ranks of a replica share it."""
        arrival = self.exchange.read(self.pending.wait(), device)
        if replica is not None and replica.size > 1:
            arrival = arrival.shared_within(replica)
        return arrival


class Landing(NamedTuple):
    """One fragment's latest landing."""

    gradient_norm: float  # of the mean outer gradient
    cosine: float  # similarity of the replicas' outer gradients, mean over the pairs
    outer_lr: float  # of the outer step; 1 for the mean at the end of a fit
    flight_s: float  # seconds from launch to landing
    waited_s: float  # seconds of it in which the training stood still
    num_bytes: int  # sent by this replica
    abstentions: int  # how often a replica has been left out of this fragment's mean, so far

    def figures(self) -> dict[str, float]:
        """Return it for a log, by name; times in ms."""
        return {
            "gradient_norm": self.gradient_norm,
            "cosine": self.cosine,
            "lr": self.outer_lr,
            "flight_ms": 1e3 * self.flight_s,
            "waited_ms": 1e3 * self.waited_s,
            "bytes": float(self.num_bytes),
            "abstentions": float(self.abstentions),
        }


class Transfers:
    """Sends fragments to the other replicas and receives what all of them sent.

    Args:
        fragments: of the model; more may come, and `open` is called again then.
        settings: of the fit.
        channel: to the other replicas.
        replica: to the other ranks of the same replica.

    Attributes:
        exchanges: the way of each fragment.
        flights: what has been launched and not landed, by fragment, in the order of launch.
        landings: the latest `Landing` by fragment.
        background: the thread of the exchanges.
    """

    def __init__(
        self,
        fragments: Sequence[OuterFragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None,
    ) -> None:
        self._fragments, self._settings = fragments, settings
        self._channel, self._replica = channel, replica
        self.wire = WIRE_FORMATS[settings.wire_dtype]

        devices = {tensor.device for f in fragments for tensor in (f.global_copy, *f.local)}
        for device in {*devices, channel.device}:  # a thread averages shards on the channel's
            warm_up(self.wire, device)

        self.background = Background(channel.ledger)
        self.flights: dict[int, FragmentInFlight] = {}
        self.landings: dict[int, Landing] = {}
        self.exchanges: list[FragmentExchange] = []
        self.open()

    def open(self) -> None:
        """Choose the ways of all fragments that there are now."""
        self.exchanges = self.ways(self.wire)

    def ways(self, wire: WireFormat) -> list[FragmentExchange]:
        """Return the cheaper way of each fragment in a wire format."""
        sizes = [(f.parameter_numel, f.shard_numel - f.parameter_numel) for f in self._fragments]
        return cheaper_fragment_exchanges(self._channel, self.background, wire, sizes)

    def send(self, p: int, exchange: FragmentExchange, values: Tensor, header: Header) -> Tensor:
        """Launch the values of a fragment.

        Returns:
            Whether they hold NaN or Inf: bool, no dimension. The header says it too.
        """
        assert p not in self.flights, f"fragment {p} is launched while it is in flight"
        nonfinite = is_nonfinite(self._fragments[p], values, self._replica)
        pending = exchange.launch(values, header._replace(nonfinite=nonfinite))
        self.flights[p] = FragmentInFlight(exchange, pending, time.perf_counter(), header.step)
        return nonfinite

    def receive(self, p: int, step: int) -> Arrival:
        """Wait for a fragment that lands after inner step `step`; decode what all have sent.

        Raises:
            RuntimeError: it must not land; see `refuse_landing`.
        """
        flight, fragment = self.flights.pop(p), self._fragments[p]
        ledger = self._channel.ledger
        before_s = ledger.seconds_waited
        flight.pending.wait()
        waited_s = ledger.seconds_waited - before_s

        arrival = flight.receive(fragment.global_copy.device, self._replica)
        if arrival.steps_differ or arrival.drifted or arrival.nonfinite:
            names = fragment.fragment.parameters
            refuse_landing(arrival, p, names, step, self._channel, self._settings)

        before = self.landings[p].abstentions if p in self.landings else 0
        self.landings[p] = Landing(
            arrival.norm,
            arrival.cosine,
            float(fragment.optimizer.param_groups[0]["lr"]),
            time.perf_counter() - flight.launched_s,
            waited_s,
            flight.exchange.num_bytes,
            len(arrival.nonfinite) + before,
        )
        return arrival

    def wait(self) -> None:
        """Take what is in flight off the wire; it still lands at its step."""
        for flight in self.flights.values():
            flight.pending.wait()

    def state_dict(self) -> dict[int, Tensor]:
        """Return what has arrived of each fragment in flight; waits for it."""
        return {p: flight.pending.wait() for p, flight in self.flights.items()}

    def load_state_dict(self, state: dict[int, Tensor], launched: dict[int, int]) -> None:
        """Put back what `state_dict` returned.

        Args:
            state: by fragment.
            launched: by fragment, the inner step after which it was launched.
        """
        assert not self.flights, "a state is loaded before the first step"
        for p, arrived in state.items():
            pending, now = Pending.here(arrived), time.perf_counter()
            self.flights[p] = FragmentInFlight(self.exchanges[p], pending, now, launched[p])


EVALUATION_TAG = "evaluation"


@dataclass(frozen=True)
class LocalMean:
    """How the mean of the replicas' local copies of a fragment is formed.

    Args:
        fragment: as this replica holds it.
        exchange: its way to the other replicas.
        as_difference: to the global copy, which the replicas share; else the values themselves.
    """

    fragment: OuterFragment
    exchange: FragmentExchange
    as_difference: bool

    def values(self) -> Tensor:
        """Return what leaves: fp32, shape (S,), a new tensor."""
        if self.as_difference:
            return self.fragment.outer_gradient()
        return self.fragment.local_values()

    def of(self, mean: Tensor) -> Tensor:
        """Return the mean local copy, fp32, shape (S,), by the mean of what has left."""
        if not self.as_difference:
            return mean
        values, numel = mean.clone(), self.fragment.parameter_numel
        torch.sub(self.fragment.global_copy[:numel], values[:numel], out=values[:numel])
        return values

    def settle(self, mean: Tensor | None) -> None:
        """Make the replicas' mean both copies; the outer optimizer has no part in it.

        The global copy then is what the local one holds, in bf16 too: a second time moves nothing.

        Args:
            mean: of what has left, the same on all replicas. None: of one replica alone. Its local
                copy stays as it is.
        """
        fragment = self.fragment
        if mean is not None:
            fragment.global_copy.copy_(self.of(mean))
            fragment.merge(mix=0.0)
        fragment.take_local()

        if mean is None and fragment.replica.size > 1:  # its ranks have buffers of their own
            fragment.merge(mix=0.0)
        fragment.landings += 1


class Evaluation:
    """Exchanges the mean for validations and checkpoints, once per inner step at most.

    Args:
        means: of every fragment.
        settings: of the fit.
        channel: to the other replicas; one replica alone shows its local copy.
        replica: to the other ranks of the same replica.

    Attributes:
        latest: the mean, of every fragment. None where there is none yet; whoever changes the
            weights makes it None.
    """

    def __init__(
        self,
        means: Sequence[LocalMean],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None,
    ) -> None:
        self._means, self._settings = means, settings
        self._channel, self._replica = channel, replica
        self.latest: list[Tensor] | None = None

    @torch.no_grad()
    def weights(self, step: int) -> list[Tensor]:
        """Return the mean of every fragment, fp32, shape (S,).

        Collective over all ranks, whose modules hold their local copies now.

        Args:
            step: inner steps done.

        Raises:
            RuntimeError: a replica's values are not finite, or the replicas are at different steps.
        """
        if self.latest is None:
            if self._channel.size == 1:
                self.latest = [mean.fragment.local_values() for mean in self._means]
            else:
                flights = [self._launch(mean, step) for mean in self._means]
                self.latest = [self._receive(p, flight, step) for p, flight in enumerate(flights)]
        return self.latest

    def _launch(self, mean: LocalMean, step: int) -> FragmentInFlight:
        values = mean.values()
        nonfinite = is_nonfinite(mean.fragment, values, self._replica)
        pending = mean.exchange.launch(values, Header(False, step, 0, nonfinite), EVALUATION_TAG)
        return FragmentInFlight(mean.exchange, pending, time.perf_counter(), step)

    def _receive(self, p: int, flight: FragmentInFlight, step: int) -> Tensor:
        mean = self._means[p]
        arrival = flight.receive(mean.fragment.global_copy.device, self._replica)
        names = mean.fragment.fragment.parameters
        refuse_landing(arrival, p, names, step, self._channel, self._settings)
        return mean.of(arrival.mean)


_ONE_FRAGMENT = (
    "No list of equal modules (transformer blocks) was found, so the whole model is one"
    " fragment, which leaves at once every `sync_every` steps."
    " `fragment_pattern='balanced'` cuts it into several of equal bytes, which leave one"
    " after the other."
)
_ALONE = (
    "There is one replica, so nothing is exchanged: the outer optimizer makes of the inner one a"
    " look-ahead optimizer. If more replicas were meant, ask the Trainer for more ranks"
    " (`devices=`, `num_nodes=`) than `replica_size` has."
)
_ENOUGH = 5  # exchanges of a fragment


class Forecast(NamedTuple):
    """What to say, and whether it is a warning: the exchanges are too few."""

    text: str
    warns: bool


def forecast_exchanges(settings: DiLoCoSettings, schedule: Schedule, last_step: int) -> Forecast:
    """Return how often a fragment leaves in a fit, and where that is rare what to change.

    Args:
        settings: of the fit.
        schedule: of its fragments.
        last_step: the inner step after which the fit ends, counted from its first start.
    """
    counts = [schedule.launches_until(p, last_step) for p in range(schedule.num_fragments)]
    often = f"{min(counts)}" + (f" to {max(counts)}" if max(counts) > min(counts) else "")
    said = (
        f"Within {last_step} optimizer steps each of the {len(counts)} fragments is exchanged"
        f" {often} times (`sync_every={settings.sync_every}`), and all of them once more when the"
        " fit ends"
    )
    if min(counts) >= _ENOUGH:
        return Forecast(f"{said}.", warns=False)

    advised = last_step // (_ENOUGH + 1)
    advice = (
        f"Take `sync_every={advised}`."
        if advised > (0 if settings.eager else int(settings.overlap_steps))
        else "The fit is too short for more."
    )
    text = (
        f"{said}: the replicas train apart for most of the fit, and until its first landing a"
        f" validation sees a fragment as it was at the start, unless `evaluate='mean'`. {advice}"
    )
    return Forecast(text, warns=True)


def foretold(diloco: StreamingDiLoCo, module: nn.Module, steps: int | None) -> list[Forecast]:
    """Return what to say at the start of a fit.

    Args:
        diloco: as it begins, or goes on.
        module: that is trained.
        steps: inner steps to come; None: nobody knows.
    """
    if diloco.num_replicas == 1:
        return [Forecast(_ALONE, warns=False)]
    said = []
    if cuts_whole(module, diloco.settings):
        said.append(Forecast(_ONE_FRAGMENT, warns=False))
    if steps is not None:
        last_step = diloco.step + steps
        said.append(forecast_exchanges(diloco.settings, diloco.schedule, last_step))
    return said


def unready_weights(
    what: str, settings: DiLoCoSettings, schedule: Schedule, step: int, count: int
) -> str:
    """Return what to say of outer weights that nothing has moved yet.

    Args:
        what: uses them.
        settings: of the fit.
        schedule: of its fragments.
        step: inner steps done.
        count: how many fragments have not landed yet.
    """
    return (
        f"This {what} uses the outer weights, and after {step} inner steps those of"
        f" {count} of {schedule.total} fragments are still those with which the fit began."
        f" With `sync_every={settings.sync_every}` and"
        f" `overlap_steps={settings.overlap_steps}` every fragment has landed once after"
        f" step {schedule.complete_after}. `evaluate='mean'` takes the mean of the"
        " replicas' local weights."
    )


class Replica:
    """Base of `StreamingDiLoCo`, with its arguments and attributes."""

    name, replicas = "Streaming DiLoCo", True
    # two of them look and change nothing; the third may be what a run that has stopped goes on with
    free_at_resume = frozenset({"check_drift_every", "nonfinite", "evaluate"})

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None = None,
    ) -> None:
        self.settings, self.step = settings, 0
        self.fragments = [
            OuterFragment(module, f, settings.outer_optimizer, replica, settings.outer_device)
            for f in fragments
        ]
        overlap_steps = 0 if settings.eager else int(settings.overlap_steps)
        self.schedule = Schedule(settings.sync_every, len(fragments), overlap_steps)
        self.optimizers: Sequence[Optimizer] = ()

        self._module, self._channel, self._replica = module, channel, replica
        self._late_parameters = LateParameters(module, fragments)
        self._transfers = Transfers(self.fragments, settings, channel, replica)
        self.means: list[LocalMean] = self._make_means()
        self.weight_swap = WeightSwap(self.fragments)
        self.evaluation = Evaluation(self.means, settings, channel, replica)

    @torch.no_grad()
    def follow_hooks(self) -> None:
        """After `finish`, let what hooks make of frozen weights count; it is alike everywhere.

        A teacher follows its student when the last optimizer step is done.
        """
        for fragment in self.fragments:
            if not (fragment.fragment.parameters or self.weight_swap.is_in):
                fragment.take_local()

    def adopt(self, was: object, ranks: int, load: object) -> None:
        """Use nothing of a save by other ranks; the checkpoint itself holds its outer weights."""
        del was, ranks, load

    def close(self) -> None:
        """End the thread of the exchanges; what is in flight is given up."""
        self._transfers.background.close()

    # -- what it says of itself

    @property
    def num_replicas(self) -> int:
        """M, this one included."""
        return self._channel.size

    @property
    def in_flight(self) -> list[int]:
        """The fragments that have been launched and not landed, in the order of launch."""
        return list(self.flights)

    @property
    def flights(self) -> dict[int, FragmentInFlight]:
        """What is in flight, by fragment."""
        return self._transfers.flights

    @property
    def landings(self) -> dict[int, Landing]:
        """The latest `Landing` by fragment."""
        return self._transfers.landings

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that this replica sends in `sync_every` steps, in which every fragment leaves."""
        return sum(exchange.num_bytes for exchange in self._transfers.exchanges)

    def cycle(self) -> tuple[dict[str, int], int]:
        """Return the bytes that this rank sends in a cycle, by tag, and the steps of a cycle."""
        return {TAG: self.bytes_per_cycle}, self.settings.sync_every

    def fingerprint(self) -> dict[str, str]:
        """Return what all replicas must share: settings, fragments, kind of outer optimizer."""
        optimizer, scheduler = self.fragments[0].optimizer, self.fragments[0].scheduler
        plain = (int, float, str, tuple, type(None))  # others show an address when printed
        defaults = {k: v for k, v in optimizer.defaults.items() if isinstance(v, plain)}
        scheduled = "" if scheduler is None else f" with {type(scheduler).__name__}"

        at_begin = self.fragments[: self.schedule.num_fragments]
        return {
            **self.settings.fingerprint(),
            "fragments": repr([list(one.fragment.parameters) for one in at_begin]),
            "outer_optimizer": f"{type(optimizer).__name__} {defaults}{scheduled}",
        }

    def figures(self) -> dict[str, float]:
        """Return per fragment what its latest landing says; the same until the next one."""
        return {
            f"outer/{name}_{p}": figure
            for p, landing in self.landings.items()
            for name, figure in landing.figures().items()
        }

    def unready(self, what: str) -> str | None:
        """Return what to say of outer weights that nothing has moved yet; None if all have moved.

        Args:
            what: uses them.
        """
        count = sum(not fragment.landings for fragment in self.fragments)
        if not count or self.settings.evaluate == "mean":
            return None
        return unready_weights(what, self.settings, self.schedule, self.step, count)

    def shown(self) -> Sequence[Tensor] | None:
        """Return what a validation sees in place of the outer weights; collective.

        The mean of the local copies with `evaluate="mean"`, as `WeightSwap.put_in` takes it.
        """
        return self.evaluation.weights(self.step) if self.settings.evaluate == "mean" else None

    # -- saves

    def wait_in_flight(self) -> None:
        """Take what is in flight off the wire; it still lands at its step."""
        self._transfers.wait()

    @torch.no_grad()
    def refuse_to_save(self, world: Channel) -> None:
        """See that a checkpoint would hold finite weights; see `nonfinite.refuse_to_save`."""
        self.wait_in_flight()
        rule = self.settings.nonfinite
        refuse_to_save(self.fragments, self.weight_swap.local, rule, self.step, world)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that all replicas have equally, and this replica's own.

        Shared are the step, the global copies and the outer optimizers; in a replica of several
        ranks, of this rank's shards. Own are the local weights and the fragments in flight, which
        are waited for; they land at their step.

        The tensors are not copies: write them before the next step, or copy them.
        """
        later = self.fragments[self.schedule.num_fragments :]
        shared = {
            "step": self.step,
            "joined": [
                [list(one.fragment.parameters), list(one.fragment.buffers), offset]
                for one, offset in zip(later, self.schedule.joined, strict=True)
            ],
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }
        own = {"local": self.weight_swap.local, "in_flight": self._transfers.state_dict()}
        return shared, own

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continue where `state_dict` was taken, with the same fragments and settings.

        Args:
            shared: the state of all replicas.
            own: this replica's. None: it joins, with nothing in flight, and its local weights are
                the global ones.
        """
        assert not self.weight_swap.is_in, "a state is loaded into the local copy"
        self.step = shared["step"]
        for parameters, buffers, offset in shared["joined"]:
            self._join(Fragment(tuple(parameters), tuple(buffers)), offset)
            for name in parameters:
                self._module.get_parameter(name).requires_grad_(True)
        for fragment, fragment_state in zip(self.fragments, shared["fragments"], strict=True):
            fragment.load_state_dict(fragment_state)

        if own is None:
            for fragment in self.fragments:
                fragment.merge(mix=0.0)
            return
        self.weight_swap.load_local(own["local"])
        launched = {p: self.schedule.latest_launch(p, self.step) for p in own["in_flight"]}
        self._transfers.load_state_dict(own["in_flight"], launched)

    # -- inside

    def _make_means(self) -> list[LocalMean]:
        """Return how the mean of the local copies is formed, for each fragment."""
        ways = zip(self.fragments, self._transfers.exchanges, strict=True)
        return [LocalMean(fragment, exchange, as_difference=True) for fragment, exchange in ways]

    def _join(self, fragment: Fragment, offset: int) -> int:
        """Let parameters that stood in no fragment be a new one; return its number."""
        kind, device = self.settings.outer_optimizer, self.settings.outer_device

        joined = OuterFragment(self._module, fragment, kind, self._replica, device)
        self.fragments.append(joined)
        self.schedule = replace(self.schedule, joined=(*self.schedule.joined, offset))

        p = len(self.fragments) - 1
        self._late_parameters.join(p, fragment, offset)
        self._transfers.open()
        self.means[:] = self._make_means()
        return p

    def _restart_from_global(self, p: int, taken: Sequence[int]) -> None:
        names = [name for q in taken for name in self.fragments[q].fragment.parameters]
        parameters = map(self._module.get_parameter, names)
        restart_from_global(self.optimizers, parameters, p, self.step, taken)


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
    """

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
    def finish(self, stop: bool = False) -> bool:
        """Land in-flight fragments, then take the plain mean of the replicas' local weights.

        All replicas call it after the same step. Global and local copies are that mean then, to the
        bit and on all replicas, averaged buffers too; a second call moves nothing. One replica
        alone keeps its local weights.

        The differences travel in the run's wire format: N/2 bytes in fp4. The outer momentum stays.

        Args:
            stop: as `after_step` takes it.

        Returns:
            Whether any replica wants to stop, as `after_step` does.
        """
        self._refuse_late()
        with self.weight_swap.local_weights():
            stops = self.land_in_flight()
            for p, _ in enumerate(self.fragments):  # frozen weights that moved may join meanwhile
                stops.append(self.settle(p, stop))
            return any(stops)

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
        """Exchange a fragment of the last round and take the mean; return as `land` does.

        It counts as an outer step of learning rate 1.
        """
        with record_function(f"launch fragment #{p}"):
            mean = self.means[p]
            header = self._header(p, stop, self._digest(p) if mean.as_difference else 0)
            self._transfers.send(p, mean.exchange, mean.values(), header)
        with record_function(f"land fragment #{p}"):
            arrival = self._receive(p)  # `means` may be others then: something may have joined
            self.means[p].settle(arrival.mean if self.num_replicas > 1 else None)
            self.landings[p] = self.landings[p]._replace(outer_lr=1.0)
            if self._channel.rank in arrival.nonfinite:
                self._restart_from_global(p, [p])
            return arrival.stop

    # -- inside

    def _exchange(self, launches: list[int], stop: bool) -> list[bool]:
        """Launch and land what is due; return for each landing whether a replica wants to stop."""
        for p in launches:
            self.launch(p, stop)
        flights = self._transfers.flights  # `finish` may have landed some ahead of their step
        return [self.land(p) for p in self.schedule.landed_at(self.step) if p in flights]

    def _receive(self, p: int) -> Arrival:
        arrival = self._transfers.receive(p, self.step)
        if arrival.late_differs:
            self._average_moved()
        return arrival

    def _header(self, p: int, stop: bool, digest: Tensor | int) -> Header:
        header = Header(stop, self.step, digest)
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
            header = self._header(p, stop=False, digest=0)
            self._transfers.send(p, self._transfers.exchanges[p], values, header)
            self.land(p)
