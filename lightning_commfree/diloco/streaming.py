"""The Streaming DiLoCo algorithm, one inner step at a time (arXiv:2501.18512, Algorithm 2).

A replica trains its local copy. For every fragment it also keeps the *global copy*: the parameters
on which all replicas last agreed. After an inner step, in this order:

1. *Launch* fragments according to the schedule: encode global copy minus local copy (fp32) once and
   send it to every replica, while training continues.
2. *Land* the fragments that were launched `overlap_steps` ago: decode the messages of all replicas,
   average them in fp32, step the outer optimizer on the global copy, and merge that into the local
   copy.

At the end of training, *finish*: land in-flight fragments, then exchange every fragment once more,
blocking, and set both copies to the plain mean of the replicas' local copies.

With `evaluate="mean"` validations use that mean instead of the outer weights, which are up to H
steps old, and in a short run still the initial ones. Training is not affected: copies, outer
optimizers and in-flight fragments stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import Membership, View
from lightning_commfree.diloco.codec import codec_of, warm_up
from lightning_commfree.diloco.exchange import (
    JOINED_BITS,
    TAG,
    Arrival,
    Flight,
    Header,
    fragment_exchanges,
)
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.frozen import FrozenParameters, refuse_late
from lightning_commfree.diloco.messages import Message, initial_weights_warning, startup_messages
from lightning_commfree.diloco.nonfinite import (
    is_nonfinite,
    refuse_landing,
    refuse_to_save,
    restart_from_global,
    take_global,
)
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.model.weight_swap import WeightSwap

EVALUATION_TAG = "evaluation"


class Landing(NamedTuple):
    """Metrics of a fragment's latest landing."""

    gradient_norm: float  # of the mean outer gradient
    cosine: float  # similarity of the replicas' outer gradients, averaged over pairs
    outer_lr: float  # learning rate of the outer step; 1 for the mean at the end of a fit
    flight_s: float  # seconds from launch to landing
    waited_s: float  # seconds of these in which training was blocked
    num_bytes: int  # sent by this replica
    abstentions: int  # times so far that a replica was left out of this fragment's mean

    def figures(self) -> dict[str, float]:
        """Return the metrics by name, for logging; times in ms."""
        return {
            "gradient_norm": self.gradient_norm,
            "cosine": self.cosine,
            "lr": self.outer_lr,
            "flight_ms": 1e3 * self.flight_s,
            "waited_ms": 1e3 * self.waited_s,
            "bytes": float(self.num_bytes),
            "abstentions": float(self.abstentions),
        }


class StreamingDiLoCo:
    """Streaming DiLoCo as run by one replica.

    Args:
        module: the model; all replicas must hold the same weights now.
        fragments: a partition of its trainable parameters.
        settings: settings of the fit.
        membership: provides the replicas. A single one sends nothing and is a Nesterov look-ahead
            optimizer.
        within: channel between the ranks of this replica, which have the same gradients; None if
            every rank is a replica. Each of its k ranks holds 1/k of the outer state and exchanges
            it with the same rank of the other replicas; all of them must call every method.

    Attributes:
        step: number of inner steps done, including those that a gradient scaler skipped.
        fragments: one `OuterFragment` per fragment; those that joined later come last.
        schedule: launch and landing steps.
        view: the current replicas.
        flights: in-flight fragments, by index, in order of launch.
        landings: the latest `Landing` by fragment.
        optimizers: the inner optimizers; a replica that abstains resets their state.
        weight_swap: swaps the outer weights into the module.
    """

    name, replicas = "Streaming DiLoCo", True
    # These do not change the training, except for `nonfinite`: changing it to "abstain" may be the
    # only way to continue a run that has stopped.
    free_at_resume = frozenset({"check_drift_every", "nonfinite", "evaluate"})

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        membership: Membership,
        within: Channel | None = None,
    ) -> None:
        self.settings, self.codec = settings, codec_of(settings.wire_dtype)
        self._module, self._membership, self._within = module, membership, within
        self.step = 0
        self.schedule = Schedule(settings.sync_every, len(fragments), settings.overlap_steps)
        self.fragments = [self._outer_fragment(fragment) for fragment in fragments]
        self.weight_swap = WeightSwap(self.fragments)
        self.optimizers: Sequence[Optimizer] = ()

        self.flights: dict[int, Flight] = {}
        self.landings: dict[int, Landing] = {}
        self._frozen = FrozenParameters(module, fragments)
        self._mean: list[Tensor] | None = None  # of the local copies; cached until the next step
        self._enter(membership.view())

        # now, so that the first launch and landing are as fast as the others
        tensors = [tensor for f in self.fragments for tensor in (f.global_copy, *f.local)]
        for device in {self.view.channel.device, *(tensor.device for tensor in tensors)}:
            warm_up(self.codec, device)

    # -- a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take an inner step in a `with` block; then call `after_step`.

        Parameters that were thawed since the last step join now, before any replica has trained
        them. A thaw in the middle of a step is noticed too late and raises after it.
        """
        if thawed := self._frozen.thawed():
            if self.settings.replica_size > 1:
                self._refuse_late()
            with torch.no_grad():
                self._join(thawed, self.schedule.next_launch(self.step))
        yield

    @torch.no_grad()
    def after_step(self, stop: bool = False) -> bool:
        """Count an inner step; launch and land fragments according to the schedule.

        Args:
            stop: whether this replica wants to stop training; sent with the fragments launched now.

        Returns:
            Whether any replica requested a stop, in the fragments that landed now. The same on all
            replicas.
        """
        assert not self.weight_swap.swapped_in, "an inner step ran on the outer weights"
        self.step += 1
        self._mean = None

        launches = self.schedule.launched_at(self.step)
        if launches or self._frozen.thawed():
            self._refuse_late()
        for p in launches:
            self.launch(p, stop)

        # not in flight: `finish` has landed them early
        landings = [p for p in self.schedule.landed_at(self.step) if p in self.flights]
        stops = [self.land(p) for p in landings]
        return any(stops)

    def launch(self, p: int, stop: bool) -> None:
        """Launch a fragment: send its outer gradient to all replicas."""
        with record_function(f"launch fragment #{p}"):
            fragment = self.fragments[p]
            gradient = fragment.outer_gradient()
            if fragment.residual is not None:  # the codec's error in the previous one
                gradient[: fragment.parameter_numel] += fragment.residual
            self.flights[p] = self._send(p, gradient, stop, residual=fragment.residual)

    def land(self, p: int) -> bool:
        """Land a fragment: outer step and merge; return whether any replica wants to stop."""
        with record_function(f"land fragment #{p}"):
            arrival = self._receive(p)
            self.fragments[p].outer_step(arrival.mean)
            self.fragments[p].average_buffers(arrival.mean)

            if self.view.rank in arrival.nonfinite:
                self._restart_from_global(p, take_global(self.fragments, p, self._within))
            else:
                self.fragments[p].merge(self.settings.mix)
            return arrival.stop

    # -- the end of a fit

    @torch.no_grad()
    def finish(self, stop: bool = False) -> bool:
        """Land in-flight fragments, then take the plain mean of the replicas' local weights.

        All replicas call it after the same step. Global and local copies then equal that mean bit
        for bit on all replicas, averaged buffers too; a second call changes nothing. A single
        replica keeps its local weights. Differences are sent in the run's wire format: N/2 bytes in
        fp4. The outer momentum stays.

        Args:
            stop: as in `after_step`.

        Returns:
            Whether any replica wants to stop, as in `after_step`.
        """
        self._refuse_late()
        with self.weight_swap.local_weights():
            stops = [self.land(p) for p in list(self.flights)]
            stops += [self._finish_fragment(p, stop) for p in range(len(self.fragments))]
            self.average_moved()
            return any(stops)

    def _finish_fragment(self, p: int, stop: bool) -> bool:
        """Set a fragment to the mean of its local copies; return as `land` does."""
        with record_function(f"launch fragment #{p}"):
            # without the codec's earlier error, which is not part of the local weights
            self.flights[p] = self._send(p, self.fragments[p].outer_gradient(), stop)
        with record_function(f"land fragment #{p}"):
            arrival = self._receive(p)
            self.fragments[p].take_mean(arrival.mean if self.num_replicas > 1 else None)
            self.landings[p] = self.landings[p]._replace(outer_lr=1.0)
            if self.view.rank in arrival.nonfinite:
                self._restart_from_global(p, [p])
            return arrival.stop

    @property
    def stops_after(self) -> int:
        """The step after which all replicas would know of a stop requested now."""
        return self.schedule.next_launch(self.step) + self.schedule.overlap_steps

    # -- messages

    def _send(
        self,
        p: int,
        values: Tensor,
        stop: bool,
        residual: Tensor | None = None,
        tag: str = TAG,
    ) -> Flight:
        """Launch a fragment's values (fp32, shape (S,))."""
        assert tag != TAG or p not in self.flights, f"fragment {p} is launched while in flight"
        nonfinite = is_nonfinite(self.fragments[p], values, self._within)
        digest = self._digest(p) if tag == TAG else 0
        header = Header(stop, self.step, digest, nonfinite, self._joined_hash)
        keep = self._membership.changes
        return Flight.launch(self._exchanges[p], values, header, residual, tag, keep)

    def _receive(self, p: int) -> Arrival:
        """Wait for a fragment, decode and check it; record its `Landing`."""
        ledger, fragment = self.view.channel.ledger, self.fragments[p]
        before_s = ledger.seconds_waited
        flight = self._wait(p)
        waited_s = ledger.seconds_waited - before_s
        del self.flights[p]

        arrival = flight.receive(fragment.global_copy.device, self._within)
        self._check(arrival, p)
        before = self.landings[p].abstentions if p in self.landings else 0
        self.landings[p] = Landing(
            gradient_norm=arrival.norm,
            cosine=arrival.cosine,
            outer_lr=float(fragment.optimizer.param_groups[0]["lr"]),
            flight_s=flight.seconds(),
            waited_s=waited_s,
            num_bytes=flight.exchange.num_bytes,
            abstentions=before + len(arrival.nonfinite),
        )
        return arrival

    def _wait(self, p: int) -> Flight:
        """Wait until a fragment has arrived; if a member is lost, relaunch it in the next view."""
        while True:
            flight = self.flights[p]
            try:
                flight.pending.wait()
                return flight
            except RuntimeError as error:
                # with a fixed membership this raises `error`
                view = self._membership.after_failure(flight.exchange.route.view, error)
                self._background.close()  # it refuses further tasks after a failed one
                self._enter(view)
                self.flights[p] = flight.relaunch(self._exchanges[p])

    def _check(self, arrival: Arrival, p: int) -> None:
        names = self.fragments[p].fragment.parameters
        refuse_landing(arrival, p, names, self.step, self.view.members, self.settings)

    def _enter(self, view: View) -> None:
        """Use `view` for all exchanges from now on."""
        self.view, self._background = view, Background(view.channel.ledger)
        self._open_exchanges()

    def _open_exchanges(self) -> None:
        """Choose the cheaper route for every fragment in the current view."""
        sizes = [(f.parameter_numel, f.shard_numel - f.parameter_numel) for f in self.fragments]
        self._exchanges = fragment_exchanges(self.view, self.codec, sizes, self._background)

    def _digest(self, p: int) -> Tensor | int:
        """Return the global copy's hash if this launch is to compare it, else 0."""
        every = self.settings.check_drift_every
        cycle = (self.step - self.schedule.offset(p)) // self.settings.sync_every
        if not every or cycle % every:
            return 0
        return self.fragments[p].digest()

    def _restart_from_global(self, p: int, taken: Sequence[int]) -> None:
        """Continue after abstaining: the fragments in `taken` now equal the global copies."""
        names = [name for q in taken for name in self.fragments[q].fragment.parameters]
        for q in taken:
            self.fragments[q].forget_loss()  # NaN, which would never go away
        parameters = map(self._module.get_parameter, names)
        restart_from_global(self.optimizers, parameters, p, self.step, taken)

    # -- frozen parameters

    def _join(self, names: Sequence[str], offset: int) -> None:
        """Add a fragment of thawed parameters."""
        self.fragments.append(self._outer_fragment(Fragment(tuple(names))))
        self.schedule = replace(self.schedule, joined=(*self.schedule.joined, offset))
        self._frozen.remove(names)
        self._open_exchanges()

    @property
    def _joined(self) -> list[tuple[list[str], int]]:
        """Parameter names and offsets of the fragments that joined during the fit."""
        later = self.fragments[self.schedule.num_fragments :]
        names = [list(one.fragment.parameters) for one in later]
        return list(zip(names, self.schedule.joined, strict=True))

    @property
    def _joined_hash(self) -> int:
        joined = self._joined
        if not joined:
            return 0
        return int.from_bytes(
            hashlib.sha256(repr(joined).encode()).digest()[: JOINED_BITS // 8], "big"
        )

    def _outer_fragment(self, fragment: Fragment) -> OuterFragment:
        settings, feedback = self.settings, self.codec.error_feedback
        factory, device = settings.outer_optimizer, settings.outer_device
        return OuterFragment(self._module, fragment, factory, self._within, device, feedback)

    def _refuse_late(self) -> None:
        """Check that every trainable parameter is in a fragment."""
        held = {name for fragment in self.fragments for name in fragment.fragment.parameters}
        named = self._module.named_parameters()
        if late := [name for name, p in named if p.requires_grad and name not in held]:
            refuse_late(late, self.settings.replica_size)

    @torch.no_grad()
    def average_moved(self) -> None:
        """Average frozen parameters that hooks have changed differently (`frozen`); collective."""
        fingerprint = {"fragments that joined": repr(self._joined)}
        self._frozen.average_moved(self.view, self._background, fingerprint)

    # -- validations

    def shown(self) -> Sequence[Tensor] | None:
        """Return weights other than the outer ones for validations to use, or None; collective.

        With `evaluate="mean"` this is the mean of the local copies, in the form that
        `WeightSwap.swap_in` takes.
        """
        return self.mean_weights() if self.settings.evaluate == "mean" else None

    @torch.no_grad()
    def mean_weights(self) -> list[Tensor]:
        """Return the mean of the local copies of every fragment, fp32, shape (S,).

        Collective over all ranks, whose modules must contain their local copies. Exchanged at most
        once per step; later calls return the same tensors.

        Raises:
            RuntimeError: a replica's values are not finite, or the replicas are at different steps.
        """
        if self._mean is None:
            if self.num_replicas == 1:
                self._mean = [fragment.local_values() for fragment in self.fragments]
                return self._mean
            # launched all at once, so that transfers overlap with decoding
            gradients = enumerate(fragment.outer_gradient() for fragment in self.fragments)
            flights = [self._send(p, g, stop=False, tag=EVALUATION_TAG) for p, g in gradients]
            self._mean = []
            for p, flight in enumerate(flights):
                arrival = flight.receive(self.fragments[p].global_copy.device, self._within)
                self._check(arrival, p)
                self._mean.append(self.fragments[p].mean_local(arrival.mean))
        return self._mean

    def unready(self, what: str) -> str | None:
        """Return a warning if `what`, a validation or checkpoint, would use initial weights."""
        count = sum(not fragment.landings for fragment in self.fragments)
        if not count or self.settings.evaluate == "mean":
            return None
        return initial_weights_warning(what, self.settings, self.schedule, self.step, count)

    # -- checkpoints

    def wait_in_flight(self) -> None:
        """Wait for the messages of in-flight fragments; these still land at their step."""
        for p in self.flights:
            self._wait(p)

    @torch.no_grad()
    def refuse_to_save(self, world: Channel) -> None:
        """Check that a checkpoint would contain finite weights only (`nonfinite`)."""
        self.wait_in_flight()
        rule = self.settings.nonfinite
        refuse_to_save(self.fragments, self.weight_swap.local, rule, self.step, world)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that is equal on all replicas, and this replica's own state.

        The shared state is the step, the global copies and the outer optimizers; in a replica of
        several ranks, this rank's shards of them. The own state is the local weights, the codec's
        rounding errors, and the messages of in-flight fragments, which this waits for.

        The tensors are not copies: save or copy them before the next step.
        """
        self.wait_in_flight()  # also completes the codec's residuals
        shared = {
            "step": self.step,
            "joined": self._joined,
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }
        own = {
            "local": self.weight_swap.local,
            "residuals": [fragment.residual for fragment in self.fragments],
            "in_flight": {p: flight.pending.wait() for p, flight in self.flights.items()},
        }
        return shared, own

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continue from a saved state, with the same fragments and settings.

        Args:
            shared: the state of all replicas.
            own: this replica's own state. None: the replica is new. It starts from the global
                weights, with no fragments in flight and no rounding errors.
        """
        assert not self.weight_swap.swapped_in, "states are loaded into the local weights"
        assert not self.flights, "load a state before the first step"
        self.step = shared["step"]

        for names, offset in shared["joined"]:
            self._join(names, offset)
            for name in names:
                self._module.get_parameter(name).requires_grad_(True)
        for fragment, fragment_state in zip(self.fragments, shared["fragments"], strict=True):
            fragment.load_state_dict(fragment_state)

        if own is None:
            for fragment in self.fragments:
                fragment.merge(mix=0.0)
            return
        self.weight_swap.load_local(own["local"])
        for fragment, residual in zip(self.fragments, own["residuals"], strict=True):
            if fragment.residual is not None:
                fragment.residual.copy_(residual)
        for p, arrived in own["in_flight"].items():
            # a header only serves a relaunch; the saved messages contain the original one
            header = Header(stop=False, step=self.schedule.latest_launch(p, self.step), digest=0)
            self.flights[p] = Flight.here(self._exchanges[p], header, Pending.here(arrived))

    def adopt(self, was: object, ranks: int, load: object) -> None:
        """Ignore states saved by another number of ranks; the checkpoint has the outer weights."""
        del was, ranks, load

    def close(self) -> None:
        """Stop the background thread; in-flight fragments are dropped."""
        self._background.close()
        self._membership.leave()

    # -- messages, metrics and settings

    def startup_messages(self, steps: int | None) -> list[Message]:
        """Return the messages to show when a fit of `steps` steps begins; None: unknown length."""
        last_step = None if steps is None else self.step + steps
        return startup_messages(
            self._module, self.settings, self.schedule, self.num_replicas, last_step
        )

    @property
    def num_replicas(self) -> int:
        """M: the number of replicas, including this one."""
        return self.view.size

    @property
    def in_flight(self) -> list[int]:
        """Indices of the fragments in flight, in order of launch."""
        return list(self.flights)

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that this replica sends in a cycle of `sync_every` steps."""
        return sum(exchange.num_bytes for exchange in self._exchanges)

    def cycle(self) -> tuple[dict[str, int], int]:
        """Return the bytes that this rank sends per cycle, by tag, and the steps of a cycle."""
        return {TAG: self.bytes_per_cycle}, self.settings.sync_every

    def figures(self) -> dict[str, float]:
        """Return the metrics of the fragments' latest landings, by name."""
        return {
            f"outer/{name}_{p}": figure
            for p, landing in self.landings.items()
            for name, figure in landing.figures().items()
        }

    def fingerprint(self) -> dict[str, str]:
        """Return settings, fragments and outer optimizer as text, to compare between replicas."""
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
