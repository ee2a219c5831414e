"""The Streaming DiLoCo algorithm (arXiv:2501.18512, Algorithm 2).

A replica trains its local copy of the model. For every fragment, it also keeps the *global copy*:
the parameters on which all replicas last agreed. After an inner step, it does the following, in
this order:

1. *Launch* fragments according to the schedule: encode the difference between the global and local
   copies (fp32) once, and exchange it while training continues.
2. *Land* the fragments that were launched `overlap_steps` steps ago: take the mean of all replicas'
   messages, computed in fp32, step the outer optimizer on the global copy, and merge the result
   into the local copy.

At the end of training, the replica *finishes*: in-flight fragments land, then every fragment is
exchanged once more, and both copies are set to the plain mean of the replicas' local copies.

With `evaluate="mean"`, validation uses that mean instead of the global copies (the *outer
weights*), which are up to `sync_every` steps old and, in a short run, may still be the initial
weights. This does not affect training.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lightning_commfree.comm.background import to_host
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.requests import Requests
from lightning_commfree.diloco.codec import CODECS, codec_of, warm_up
from lightning_commfree.diloco.exchange import TAG, Arrival, Arrived, Header, mean_cosine
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.frozen import FrozenParameters
from lightning_commfree.diloco.messages import Message, initial_weights_warning, startup_messages
from lightning_commfree.diloco.nonfinite import (
    NONFINITE_VALUES,
    is_nonfinite,
    refuse_landing,
    refuse_to_save,
    reset_nonfinite_state,
    take_global,
)
from lightning_commfree.diloco.outer import NONE_FROZEN, Frozen, OuterFragment
from lightning_commfree.diloco.pace import Pacer, Timing
from lightning_commfree.diloco.schedule import Pace, Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings, default_outer_optimizer
from lightning_commfree.diloco.transport import Delivery, Flight, Transport
from lightning_commfree.model.replication import AveragedBuffers
from lightning_commfree.model.trained import trained_parameters
from lightning_commfree.model.weight_swap import WeightSwap

EVALUATION_TAG = "evaluation"


class Landing(NamedTuple):
    """Metrics of one fragment's latest landing."""

    gradient_norm: float  # norm of the mean outer gradient
    cosine: float  # similarity of the replicas' outer gradients (`mean_cosine`)
    outer_lr: float  # learning rate of the outer step; 1 for the mean at the end of a fit
    flight_s: float  # time from launch to landing
    waited_s: float  # time during which training was blocked
    num_bytes: int  # number of bytes that this replica sent
    abstentions: int  # number of times so far that a replica was left out of this fragment's mean

    def figures(self) -> dict[str, float]:
        """Return a dict of metrics for logging, with times in ms."""
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
    """The Streaming DiLoCo algorithm on one replica.

    All replicas must start with the same weights. Each of a replica's k ranks has the same
    gradients or another shard of them, and exchanges its 1/k of the outer state with the same rank
    in the other replicas. All ranks must call every method. A single replica sends nothing.
    """

    name = "Streaming DiLoCo"
    # Settings that do not change the training, and `nonfinite`: changing it to "abstain" may be the
    # only way to continue a run that has stopped.
    free_at_resume = frozenset({"check_drift_every", "nonfinite", "evaluate"})

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],  # a partition of the model's trained parameters
        settings: DiLoCoSettings,
        transport: Transport,
        within: Channel | None = None,  # None: every rank is a replica
        requests: Requests | None = None,  # sent with every launch
        missed: Callable[[], int] = lambda: 0,  # number of batches trained on without a step
    ) -> None:
        self.requests = requests or Requests()
        self.settings, self.codec = settings, codec_of(settings.wire_dtype)
        # no later round would make up for rounding errors in the last round or an evaluation round
        self._last_codec = CODECS["fp4"] if self.codec.error_feedback else self.codec
        self._feedback = float(self.codec.error_feedback)
        self._module, self.transport, self._within = module, transport, within
        self.step = 0  # inner steps taken, including those skipped by a gradient scaler
        overlap_steps = settings.first_overlap_steps
        self.schedule = Schedule(settings.first_sync_every, len(fragments), overlap_steps)
        # with `sync_every="auto"`; otherwise the schedule never changes
        self.pacer = Pacer(overlap_steps, self.ledger)
        self.say: Callable[[str], object] = lambda _: None  # called on all ranks with each change
        self.buffers = AveragedBuffers(module, [b for one in fragments for b in one.buffers])
        # fragments that are added during the fit come last
        self.fragments = [self._outer_fragment(fragment) for fragment in fragments]
        self.weight_swap = WeightSwap(self.fragments)
        self.optimizers: Sequence[Optimizer] = ()  # the inner ones; hooks may replace them
        # sent with every exchange, so that replicas notice if they are on different batches
        self._missed = missed
        # whether parameters that are frozen during the fit are exchanged as if they were trained,
        # instead of settling (`outer.Frozen`)
        self.ignores_frozen = False

        self.flights: dict[int, Flight] = {}  # by fragment, in order of launch
        self._landings: dict[int, Pending[Landing]] = {}
        self._abstentions: Counter[int] = Counter()
        self._frozen = FrozenParameters(module, fragments, lambda: self.optimizers)
        held = {name for fragment in fragments for name in fragment.parameters}
        self._parameters = {n: p for n, p in module.named_parameters() if n in held}
        self._warned_initial = False
        self.landed = 0  # exchanges, the final means too
        self._open_exchanges()

    def warm_up(self) -> None:
        """Run each codec once per device, so that the first launch and landing are not slow."""
        tensors = [tensor for f in self.fragments for tensor in (f.global_copy, *f.local)]
        for device in {self.view.channel.device, *(tensor.device for tensor in tensors)}:
            for codec in (self.codec, self._last_codec):
                warm_up(codec, device)

    # -- a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context manager around an inner step; it first makes unfrozen parameters a fragment.

        Call `after_step` when it exits.
        """
        # add newly unfrozen parameters now, before any replica trains them
        if unfrozen := self._frozen.unfrozen():
            if self.settings.replica_size > 1:
                self._check_all_in_fragments()
            with torch.no_grad():
                self._join(unfrozen, self.schedule.next_launch(self.step))
        yield

    @torch.no_grad()
    def after_step(self) -> None:
        """Count an inner step, and launch and land fragments according to the schedule.

        Raise a `RuntimeError` if a fragment cannot land (`refuse_landing`), or if parameters were
        unfrozen during the step or replaced.
        """
        assert not self.weight_swap.swapped_in, "an inner step ran on the outer weights"
        self.step += 1
        self.pacer.step_ends()

        launches = self.schedule.launched_at(self.step)
        if launches or self._frozen.unfrozen():
            self._check_all_in_fragments()
        for p in launches:
            with self.pacer.working(p):
                self.launch(p)

        # a fragment that is not in flight was landed early by `finish`
        landed = [p for p in self.schedule.landed_at(self.step) if p in self.flights]
        for p in landed:
            self.land_due(p)
        self.pacer.step_begins()

    def land_due(self, p: int) -> None:
        """Land a fragment on schedule; after fragment 0, change the pace if need be."""
        with self.pacer.working(p):
            self.land(p)
        # an elastic replica that leaves lands it when it is back
        if self.settings.is_auto and p == 0 and p not in self.flights:
            self._change_pace()

    def _change_pace(self) -> None:
        """Change H and tau from fragment 0's next launch on, if the measurements call for it."""
        schedule, now = self.schedule, self.schedule.paces[-1]
        sync_every, overlap_steps = self.pacer.choose(*now[1:], len(self.fragments))
        # fragments that joined during the fit keep to their cycle
        if (sync_every, overlap_steps) == now[1:] or schedule.joined:
            return
        pace = Pace(schedule.next_launch_of(0, self.step), sync_every, overlap_steps)
        self.schedule = schedule.changed(pace)
        self.say(
            f"After step {pace.begins}, each fragment is exchanged every {sync_every} steps and"
            f" lands after {overlap_steps} (before: {now.sync_every} and {now.overlap_steps}),"
            f" because {self.pacer.describe()}."
        )

    def launch(self, p: int) -> None:
        """Launch a fragment: start sending its outer gradient to all replicas, as a new flight."""
        with record_function(f"launch fragment #{p}"):
            fragment, residual = self.fragments[p], self.fragments[p].residual
            frozen = self._frozen_at(p)
            fragment.clear_residual(frozen.settling | frozen.settled | fragment.settled)
            values = fragment.local_values()  # a copy: training continues
            used = [values] if residual is None else [values, residual]
            with self.transport.background.staging.beside_training(used):
                # on CUDA, a global copy in host memory is uploaded here, without delaying training
                outer = fragment.global_copy.to(values.device, non_blocking=True)
                fragment.subtract_from(outer, values)
                if residual is not None:  # error feedback
                    values[: fragment.parameter_numel] += residual.mul_(self._feedback)
                self.flights[p] = self._send(p, values, residual, outer=outer, frozen=frozen)

    def land(self, p: int) -> None:
        """Land a fragment: take the outer step and merge the global copy into the local copy."""
        with record_function(f"land fragment #{p}"):
            frozen = self.flights[p].frozen
            arrival = self._receive(p)
            if self.schedule.is_first_at_pace(p, self.step):
                # momentum of shorter or longer cycles does not fit (`pace`)
                self.fragments[p].optimizer.state.clear()
            self.outer_step(p, arrival.mean, frozen)
            self.merge(p, abstained=self.view.rank in arrival.summary.nonfinite, frozen=frozen)

    def merge(self, p: int, abstained: bool, frozen: Frozen = NONE_FROZEN) -> None:
        """Merge a fragment's global copy into the local one, or overwrite that if `abstained`."""
        if abstained:
            self._reset_after_abstaining(p, take_global(self.fragments, p, self._within))
        else:
            self.fragments[p].merge(self.settings.mix, frozen=frozen)

    def outer_step(self, p: int, mean_gradient: Tensor, frozen: Frozen = NONE_FROZEN) -> None:
        """Step the global copy with the mean outer gradient (fp32, (S,)); `frozen` ones settle."""
        self.fragments[p].outer_step(mean_gradient, frozen)
        self.fragments[p].average_buffers(mean_gradient)
        self.landed += 1

    # -- the end of a fit

    @torch.no_grad()
    def finish(self) -> None:
        """Land flights; then set local weights and global copies to the replicas' mean; collective.

        All replicas must call it after the same step. Both copies then equal that mean, bit for bit
        on all replicas; a second call changes nothing. A single replica keeps its local weights.
        """
        self._check_all_in_fragments()
        with self.weight_swap.local_weights():
            for p in list(self.flights):
                self.land(p)
            for p in range(len(self.fragments)):
                self._finish_fragment(p)
            self.average_moved()

    def _finish_fragment(self, p: int) -> None:
        """Set both copies of a fragment to the mean of the replicas' local copies; collective."""
        with record_function(f"launch fragment #{p}"):
            # without the residual, which is not part of the local weights
            frozen, values = self._frozen_at(p), self.fragments[p].outer_gradient()
            self.flights[p] = self._send(p, values, frozen=frozen)
        with record_function(f"land fragment #{p}"):
            arrival = self._receive(p)
            self.fragments[p].take_mean(None if self.is_alone else arrival.mean, frozen)
            self.landed += 1
            self._landings[p] = self._landings[p].then(lambda one: one._replace(outer_lr=1.0))
            if self.view.rank in arrival.summary.nonfinite:
                self._reset_after_abstaining(p, [p])

    @property
    def stops_after(self) -> int:
        """The inner step after which every replica will have received a stop requested now."""
        return self.schedule.next_landing(self.step)

    # -- messages

    def _send(
        self,
        p: int,
        values: Tensor,
        residual: Tensor | None = None,
        tag: str = TAG,
        outer: Tensor | None = None,  # the global copy to hash, if it is on the device of `values`
        frozen: Frozen = NONE_FROZEN,
    ) -> Flight:
        """Start exchanging a fragment's `values` (fp32, shape (S,)); return the flight."""
        assert tag != TAG or p not in self.flights, f"fragment {p} is launched while in flight"
        nonfinite = is_nonfinite(self.fragments[p], values, self._within)
        hashed = self._digest(p, outer) if tag == TAG else 0
        changed, device = self._changed_hash(p, frozen), self.fragments[p].global_copy.device
        requests = self.requests.outgoing() if tag == TAG else 0  # nobody reads an evaluation's
        words = requests, self.step, hashed, nonfinite, changed, self.weight(p), self._missed()
        # of a fixed H, messages are the same in every run
        timing = self.pacer.timing(p) if self.settings.is_auto else Timing()
        pending = self.transport.launch(p, values, Header(*words, *timing), residual, tag, device)
        return Flight(pending, frozen)

    def weight(self, p: int) -> int:
        """Return 1, the weight of this replica's values in a fragment's mean."""
        del p
        return 1

    def _receive(self, p: int) -> Arrival:
        """Wait for a fragment's messages, record a `Landing` and requests; return the `Arrival`.

        Raise an error if the fragment may not land.
        """
        ledger, fragment, flight = self.view.channel.ledger, self.fragments[p], self.flights[p]
        before_s = ledger.seconds_waited
        delivery = self.transport.wait(flight.pending)
        waited_s = ledger.seconds_waited - before_s
        del self.flights[p]

        arrival = self._decode(delivery, p)
        self.requests.incoming(arrival.summary.requests)
        self.pacer.landed(p, delivery.arrived.link_s, arrival.summary.timing)
        self._abstentions[p] += len(arrival.summary.nonfinite)
        landing = partial(
            Landing,
            outer_lr=fragment.outer_lr,
            flight_s=flight.seconds(),
            waited_s=waited_s,
            num_bytes=delivery.exchange.num_bytes,
            abstentions=self._abstentions[p],
        )
        # norms are copied from a CUDA device while training continues
        norms, norms_arrived = to_host(arrival.norms, self.view.channel.peers)
        weights = arrival.summary.counted_weights
        self._landings[p] = Pending(norms_arrived).then(
            lambda _: landing(
                gradient_norm=float(norms[-1].sqrt()), cosine=mean_cosine(norms, weights)
            )
        )
        return arrival

    def _decode(self, delivery: Delivery, p: int) -> Arrival:
        """Decode a fragment's messages into an `Arrival`; raise an error if it may not land."""
        arrival = delivery.decode(self.fragments[p].global_copy.device, self._within)
        names = self.fragments[p].fragment.parameters
        refuse_landing(arrival.summary, p, names, self.step, self.view, self.settings)
        return arrival

    def _open_exchanges(self) -> None:
        """Let the transport prepare exchanges for the fragments that there are now."""
        sizes = [(f.parameter_numel, f.shard_numel - f.parameter_numel) for f in self.fragments]
        self.transport.open((self.codec, self._last_codec), sizes)

    def _digest(self, p: int, outer: Tensor | None) -> Tensor | int:
        """Hash a fragment's global copy; return 0 if this launch does not compare hashes."""
        every = self.settings.check_drift_every
        if not every or self.schedule.launches_until(p, self.step) % every:
            return 0
        return self.fragments[p].digest() if outer is None else digest(outer)

    def _reset_after_abstaining(self, p: int, taken: Sequence[int]) -> None:
        """Clear residuals and nonfinite optimizer state of the fragments `taken`, and warn.

        They were reset to the global copy, because the mean of fragment `p` leaves out this
        replica.
        """
        names = [name for q in taken for name in self.fragments[q].fragment.parameters]
        for q in taken:
            self.fragments[q].clear_residual()  # otherwise it stays NaN
        reset_nonfinite_state(self.optimizers, map(self._module.get_parameter, names))
        warnings.warn(
            f"This replica was left out of the mean of fragment {p}, which landed after inner step"
            f" {self.step}, because its values were not finite ({NONFINITE_VALUES}). It continues"
            f" from the global copy of fragments {', '.join(map(str, taken))}; the inner"
            " optimizer's state for their parameters was reset where it was not finite.",
            stacklevel=2,
        )

    # -- frozen parameters

    def _join(self, names: Sequence[str], offset: int) -> None:
        """Add a fragment for parameters that were unfrozen."""
        self.fragments.append(self._outer_fragment(Fragment(tuple(names))))
        self.schedule = replace(self.schedule, joined=(*self.schedule.joined, offset))
        self._frozen.remove(names)
        self._open_exchanges()

    @property
    def _joined(self) -> list[tuple[list[str], int]]:
        """Parameter names and offset of each fragment that was added during the fit."""
        later = self.fragments[self.schedule.num_fragments :]
        names = [list(one.fragment.parameters) for one in later]
        return list(zip(names, self.schedule.joined, strict=True))

    def _frozen_at(self, p: int) -> Frozen:
        """Return which of a fragment's parameters are frozen now; raise if one was replaced."""
        self._refuse_replaced(p)
        if self.ignores_frozen:
            return NONE_FROZEN
        trained = trained_parameters(self._module, self.optimizers)
        names = self.fragments[p].fragment.parameters
        now = frozenset(i for i, name in enumerate(names) if name not in trained)
        settled = self.fragments[p].settled
        return Frozen(now - settled, now & settled)

    def _refuse_replaced(self, p: int) -> None:
        """Raise a `RuntimeError` if a fragment's parameter is replaced or gone; note new ones."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        names = self.fragments[p].fragment.parameters
        self._parameters = {n: now[n] for n in names if n in now} | self._parameters
        late = [name for name in names if now.get(name) is not self._parameters[name]]
        if late:
            raise RuntimeError(
                f"The parameters {late[:3]}{' and others' if late[3:] else ''} were replaced during"
                " the fit by other `nn.Parameter` objects, or removed (as `torch.nn.utils.prune`"
                " does), but fragments exchange them by name. Write values into the existing"
                " parameters, with `load_state_dict` on all ranks, or make the change before `fit`."
            )

    def _changed_hash(self, p: int, frozen: Frozen) -> int:
        """Return a hash of which fragments joined and what is frozen in this one; 0 if neither."""
        joined, indices = self._joined, sorted(frozen.settling | frozen.settled)
        if not joined and not indices:
            return 0
        text = repr((joined, p, indices)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")  # one int64 word

    def _outer_fragment(self, fragment: Fragment) -> OuterFragment:
        factory = self.settings.outer_optimizer
        if factory is None:
            factory = default_outer_optimizer(self.num_replicas, self.settings.first_sync_every)
        device, keeps = self.settings.outer_device, self.codec.error_feedback > 0
        return OuterFragment(
            self._module, fragment, factory, self._within, device, keeps, self.buffers
        )

    def _check_all_in_fragments(self) -> None:
        """Raise a `RuntimeError` if a trained parameter is in no fragment."""
        late = sorted(self._frozen.unfrozen())
        if not late:
            return

        size = self.settings.replica_size
        if size > 1:
            why = f"with `replica_size={size}` their gradients are not averaged in a replica"
            advice = "or end the fit and start another one"
        else:
            why = "they belong to no fragment, so every replica would train its own"
            advice = (
                "or between two steps, as `BackboneFinetuning` does when an epoch begins, but not"
                " in the middle of a step"
            )
        raise RuntimeError(
            f"The parameters {late} became trainable during the fit, and {why}. Make them trainable"
            f" before `fit`, {advice}."
        )

    @torch.no_grad()
    def average_moved(self) -> None:
        """Average frozen parameters that differ between replicas because of hooks; collective."""
        fingerprint = {"fragments that joined": repr(self._joined)}
        self._frozen.average_moved(self.view, self.transport.background, fingerprint)

    # -- validations

    def shown(self, what: str) -> Sequence[Tensor] | None:
        """Return the weights to validate or save, None for the outer weights; collective.

        They are for `WeightSwap.swap_in`. Before a validation, average moved parameters too. A save
        must not change the training.
        """
        if what == "validation":
            self.average_moved()
        if self.settings.evaluate == "mean":
            return self.mean_weights()
        self._warn_if_initial(what)
        return None

    def _warn_if_initial(self, what: str) -> None:
        """Warn once, on the first rank, if the outer weights are partly the initial ones."""
        count = sum(not fragment.landings for fragment in self.fragments)
        if not count or self._warned_initial:
            return
        self._warned_initial = True
        if self.view.rank == 0 and (self._within is None or self._within.rank == 0):
            text = initial_weights_warning(what, self.schedule, self.step, count)
            warnings.warn(text, stacklevel=2)

    @torch.no_grad()
    def mean_weights(self) -> list[Tensor]:
        """Return each fragment's mean of local copies, as decoded from the wire: fp32, shape (S,).

        Collective over all ranks; errors are those of `refuse_landing`. Each call exchanges the
        local copies like outer gradients, because hooks and forward passes may change them between
        two steps. The module must contain them, not the outer weights.
        """
        if self.num_replicas == 1:
            return [fragment.local_values() for fragment in self.fragments]
        # launch all exchanges first, so that transfers overlap with decoding
        gradients = enumerate(fragment.outer_gradient() for fragment in self.fragments)
        flights = [
            self._send(p, g, tag=EVALUATION_TAG, frozen=self._frozen_at(p)) for p, g in gradients
        ]
        means = []
        for p, flight in enumerate(flights):
            arrival = self._decode(self.transport.wait(flight.pending), p)
            means.append(self.fragments[p].mean_local(arrival.mean, flight.frozen))
        return means

    @torch.no_grad()
    def restart(self, broadcast: Callable[[], None]) -> None:
        """Take rank 0's weights, which `broadcast` loads; collective.

        Flights are dropped, and the schedule goes on. The outer optimizers' state is cleared.
        """
        self.wait_in_flight()  # `broadcast` uses the same channels
        broadcast()
        self.flights.clear()
        for fragment in self.fragments:
            fragment.take_local()
            fragment.clear_residual()
            fragment.optimizer.state.clear()

    # -- checkpoints

    def wait_in_flight(self) -> None:
        """Wait until the messages of all in-flight fragments have arrived; they land later."""
        for flight in self.flights.values():
            self.transport.wait(flight.pending)

    @torch.no_grad()
    def refuse_to_save(self, world: Channel) -> None:
        """Raise an error on all ranks if a checkpoint would contain NaN or Inf; collective."""
        self.wait_in_flight()
        rule = self.settings.nonfinite
        refuse_to_save(self.fragments, self.weight_swap.local, rule, self.step, world)

    def averaged_buffers(self) -> AveragedBuffers:
        """Return the one `AveragedBuffers` object that all fragments share."""
        return self.buffers

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a tuple: the state that all replicas share, and this replica's own.

        In a multi-rank replica, the shared state contains only this rank's shard. Tensors are not
        copied, so save or copy them before the next step. The own state contains the messages of
        in-flight fragments, which this method waits for.
        """
        self.wait_in_flight()  # also completes the codec's residuals
        shared = {
            "step": self.step,
            "paces": [tuple(pace) for pace in self.schedule.paces],
            "pacer": self.pacer.state_dict(),
            "joined": self._joined,
            "own_buffers": sorted(self.buffers.own),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }
        own = {
            "local": self.weight_swap.local,
            "residuals": [fragment.residual for fragment in self.fragments],
            "in_flight": self.transport.saved(self.flights),
            "frozen": {p: [sorted(i) for i in f.frozen] for p, f in self.flights.items()},
        }
        return shared, own

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continue from the states of `state_dict`, with the same fragments and settings.

        `own` is None for a new replica, which starts from the global weights with no fragments in
        flight.
        """
        assert not self.weight_swap.swapped_in, "states are loaded into the local weights"
        assert not self.flights, "load a state before the first step"
        self.step = shared["step"]
        self.buffers.keep_own(shared["own_buffers"])
        self.load_paces(shared)
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
        for p, messages in own["in_flight"].items():
            delivery = Delivery(self.transport.exchange(p), Arrived(*messages))
            frozen = Frozen(*map(frozenset, own["frozen"][p]))
            self.flights[p] = Flight(Pending.here(delivery), frozen)

    def load_paces(self, shared: dict[str, Any]) -> None:
        """Restore the schedule and the pacer from the state that all replicas share."""
        settings = self.settings
        first = settings.first_sync_every, self.schedule.num_fragments, settings.first_overlap_steps
        self.schedule = Schedule(*first)
        for pace in shared["paces"][1:]:
            self.schedule = self.schedule.changed(Pace(*pace))
        self.pacer.load_state_dict(shared["pacer"])

    def overwrites(self, shared: dict[str, Any], own: object) -> set[str]:
        """Return the names of the module's tensors that `load_state_dict` would overwrite."""
        del own
        return self.weight_swap.names.union(*(names for names, _ in shared["joined"]))

    def adopt(self, saved_fingerprint: object, num_ranks: int, load_states: object) -> None:
        """Return None: nothing is reused with different settings or another number of ranks."""
        del saved_fingerprint, num_ranks, load_states

    def close(self) -> None:
        """Discard in-flight fragments, and leave the group."""
        self.transport.close()

    # -- messages, metrics and settings

    def startup_messages(self, steps: int | None) -> list[Message]:
        """Return the messages to show at the start of a fit of `steps` steps (None if unknown)."""
        last_step = None if steps is None else self.step + steps
        return startup_messages(
            self._module, self.settings, self.schedule, self.num_replicas, last_step
        )

    @property
    def view(self) -> View:
        """The current replicas."""
        return self.transport.view

    @property
    def ledger(self) -> Ledger:
        """The counter of bytes that this rank sends to other replicas."""
        return self.view.channel.ledger

    @property
    def num_replicas(self) -> int:
        """M, the number of replicas, including this one."""
        return self.view.size

    @property
    def is_alone(self) -> bool:
        """Whether there is no other replica, so that the local weights are the mean."""
        return self.num_replicas == 1

    @property
    def landings(self) -> dict[int, Landing]:
        """Each fragment's latest `Landing`, by index. Reading this may wait for a CUDA device."""
        return {p: pending.wait() for p, pending in self._landings.items()}

    @property
    def in_flight(self) -> list[int]:
        """Indices of the in-flight fragments, in launch order."""
        return list(self.flights)

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that this replica sends per cycle of `sync_every` steps."""
        return sum(self.transport.exchange(p).num_bytes for p in range(len(self.fragments)))

    def cycle(self) -> tuple[dict[str, int], int]:
        """Return the bytes that this rank sends per cycle, by ledger tag, and the cycle length."""
        return {TAG: self.bytes_per_cycle}, self.schedule.sync_every

    def figures(self) -> dict[str, float]:
        """Return a dict of metrics from all fragments' latest landings, for logging."""
        found = {
            f"outer/{name}_{p}": figure
            for p, landing in self.landings.items()
            for name, figure in landing.figures().items()
        }
        if self.settings.is_auto:
            found["outer/sync_every"] = float(self.schedule.sync_every)
            found["outer/overlap_steps"] = float(self.schedule.overlap_steps)
        return found

    def fingerprint(self) -> dict[str, str]:
        """Describe settings, fragments and outer optimizer, so that replicas can compare them."""
        optimizer, scheduler = self.fragments[0].optimizer, self.fragments[0].scheduler
        plain = (int, float, str, tuple, type(None))  # the repr of others may contain an address
        defaults = {k: v for k, v in optimizer.defaults.items() if isinstance(v, plain)}
        scheduled = "" if scheduler is None else f" with {type(scheduler).__name__}"

        at_begin = self.fragments[: self.schedule.num_fragments]
        return {
            **self.settings.fingerprint(),
            "fragments": repr([list(one.fragment.parameters) for one in at_begin]),
            "buffers": self.buffers.describe(),
            "outer_optimizer": f"{type(optimizer).__name__} {defaults}{scheduled}",
        }
