"""Domino's schedule: interleave the sublayers of multiple micro-batches, forward and backward.

There are K sublayers and M micro-batches. The forward pass does the following for each sublayer k
and each micro-batch i:

1. *land*: wait for the sum of sublayer k - 1 of micro-batch i,
2. *enter*: compute the residual stream and the norm of sublayer k,
3. *body*: compute the partial sum,
4. *launch* its all-reduce, which is in flight while the other micro-batches compute sublayer k.

If the embedding enters the first block unchanged, its all-reduces are launched first, and the first
sublayer waits for them.

The backward pass does the following for each k and each i, both from last to first:

1. *land*: wait for dx of sublayer k + 1 of micro-batch i,
2. *enter*, backward: compute d(partial) of sublayer k, through the norm and the residual stream,
3. *body*, backward: compute this rank's dx,
4. *launch* the all-reduce of dx, which is in flight during step 5 and while the other micro-batches
   run backward through sublayer k,
5. *weights*, backward: compute the gradients of the linear layers' weights.

By itself, autograd would run backward in the reverse order of forward and wait for each all-reduce
right after launching it. So each micro-sublayer (one sublayer of one micro-batch) has its own
graphs, and a single autograd node for all blocks runs them. Collectives are outside these graphs,
so activation checkpointing recomputes without repeating communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_commfree.comm.channel import Pending
from lightning_commfree.domino.layers import (
    BACKWARD_TAG,
    FORWARD_TAG,
    TensorGroup,
    Trace,
    weight_gradients,
)
from lightning_commfree.domino.splits import Launch, Split
from lightning_commfree.domino.sublayers import (
    Arguments,
    InputTensors,
    MicroInput,
    MicroSublayer,
    Sublayer,
    leaf,
)

Done = Callable[[Sublayer], None]
InFlight = list[Pending[Tensor]]  # all-reduces of one micro-sublayer: one, or one per slice

EMBEDDING = "embedding"  # name in traces, in place of a sublayer's


class Autocast(NamedTuple):
    """Autocast state during forward, to be restored in backward, which runs outside autocast."""

    device_type: str = "cpu"
    enabled: bool = False
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, device_type: str) -> Autocast:
        """Return the current autocast state for a device type, such as "cuda"."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type))

    def restored(self) -> AbstractContextManager[None]:
        """Return a context manager that restores this state, but not autocast's weight cache."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


@dataclass
class ScheduleRun:
    """One pass of a batch through all blocks, forward and then backward."""

    sublayers: Sequence[Sublayer]  # of all blocks, in order
    group: TensorGroup
    split: Split
    checkpoint: bool = False  # whether backward recomputes instead of keeping activations
    trace: Trace | None = None  # called on every event, such as "launch forward"
    done: Done | None = None  # called with a sublayer when its parameters' gradients are complete
    unsummed: bool = False  # whether the input is this rank's partial sum of the embedding
    _autocast: Autocast = field(default=Autocast(), init=False)
    # both are indexed by sublayer, then by micro-batch
    _inputs: list[list[MicroInput]] = field(default_factory=list, init=False)
    _computed: list[list[MicroSublayer]] = field(default_factory=list, init=False)
    _ends: list[tuple[InputTensors, Tensor]] = field(default_factory=list, init=False)

    # -- forward

    def forward(self, hidden: Tensor, arguments: Sequence[Arguments]) -> Tensor:
        """Return the last block's output for `hidden`, shape (B, T, H), without an autograd graph.

        `arguments` has one entry for all blocks, or one per block.
        """
        self._autocast = Autocast.of(hidden.device.type)
        streams = list(self.split.micro_batches(hidden))
        given = [self.split.micro_arguments(of_block, hidden) for of_block in arguments]
        per_block = len(self.sublayers) // len(given)  # all sublayers if arguments are shared

        # clone: all-reduce is in place, and the micro-batches share the embedding's memory
        embeddings = enumerate(streams) if self.unsummed else ()
        in_flight = {i: [self._launch(x.clone(), "forward", EMBEDDING, i)] for i, x in embeddings}

        previous: Sublayer | None = None
        for k, sublayer in enumerate(self.sublayers):
            micros: list[MicroSublayer] = []
            with self.group.sharing_casts():
                for i, own in enumerate(given[k // per_block]):
                    tensors = self._input_tensors(previous, streams[i], in_flight.get(i, []), i)
                    source = MicroInput(sublayer, own, tensors, self._record_random(hidden.device))
                    micro, in_flight[i] = self._forward_micro(source, micros, i)
                    streams[i] = micro.entered.detach()  # the graph stays with the micro-sublayer
                    micros.append(micro)
            self._keep_for_backward(micros)
            previous = sublayer

        return self.split.join(
            [self._land_output(streams[i], in_flight[i], i) for i in range(len(streams))]
        )

    def _input_tensors(
        self, previous: Sublayer | None, stream: Tensor, in_flight: InFlight, i: int
    ) -> InputTensors:
        """Return new leaves: the residual stream and, unless first, the landed sum before it."""
        if previous is not None:
            total = self._land(in_flight, "forward", previous.name, i)
            return InputTensors((leaf(stream), leaf(total)), previous.finish)

        if in_flight:
            stream = self._land(in_flight, "forward", EMBEDDING, i)
        return InputTensors((leaf(stream),))

    def _record_random(self, device: torch.device) -> Callable[[], Any]:
        """Return `MicroInput.replayed`: if backward recomputes, it repeats draws from here on."""
        if not self.checkpoint:
            return nullcontext
        return partial(self.group.replayed, device, self.group.random_states(device))

    def _forward_micro(
        self, source: MicroInput, earlier_micros: Sequence[MicroSublayer], i: int
    ) -> tuple[MicroSublayer, InFlight]:
        """Compute one micro-sublayer; return it with the all-reduces it has launched."""
        launched: InFlight = []

        def launch(partial_sum: Tensor) -> None:
            # summing in place is safe: backward does not read a row linear's output
            summand = partial_sum.detach()
            launched.append(self._launch(summand, "forward", source.sublayer.name, i))

        with torch.set_grad_enabled(not self.checkpoint):
            micro = self._enter(source, i, "forward")
            self._run_body(micro, earlier_micros, i, "forward", launch)
        return micro, launched

    def _enter(self, source: MicroInput, i: int, direction: str) -> MicroSublayer:
        """Return a new micro-sublayer, whose residual stream and norm are computed."""
        name = source.sublayer.name
        self._trace_event(f"enter {direction}", name, i)
        with record_function(f"enter {name} #{i}"):
            return MicroSublayer(source)

    def _run_body(
        self,
        micro: MicroSublayer,
        earlier_micros: Sequence[MicroSublayer],
        i: int,
        direction: str,
        launch: Launch,
    ) -> None:
        """Compute the body into `micro.outputs`, and pass each of this rank's sums to `launch`."""
        name, device = micro.sublayer.name, micro.x.device
        self._trace_event(f"body {direction}", name, i)
        # switching generators copies their states: do it only where dropout uses them
        own = self.group.own_random(device) if micro.sublayer.draws_own() else nullcontext()
        with record_function(f"body {name} #{i}"), self.group.under_schedule() as calls, own:
            self.split.run(micro, earlier_micros, launch)
        micro.weights = weight_gradients(calls)

    def _keep_for_backward(self, micros: list[MicroSublayer]) -> None:
        """Keep the inputs and, unless backward recomputes, the graphs."""
        self._inputs.append([micro.source for micro in micros])
        if not self.checkpoint:
            self._computed.append(micros)

    def _land_output(self, stream: Tensor, in_flight: InFlight, i: int) -> Tensor:
        """Land a micro-batch's last sum; return the last block's output, without its graph."""
        tensors = self._input_tensors(self.sublayers[-1], stream, in_flight, i)
        with torch.enable_grad():
            output = tensors.add()
        self._ends.append((tensors, output))
        return output.detach()

    # -- backward

    def backward(self, gradient: Tensor) -> Tensor:
        """Run backward from the output's gradient: add to `grad`s, return that of `hidden`."""
        # autograd calls this with grad mode off, but checkpointing must rebuild graphs
        with torch.enable_grad(), self._autocast.restored():
            d_streams, d_partials = self._backward_ends(gradient)
            order = range(len(d_streams) - 1, -1, -1)

            # the last sublayer has no dx of a later sublayer to land
            micros = self._pop_micros()
            in_flight = {i: self._body_backward(micros[i], d_partials[i], i) for i in order}
            while self._inputs:
                after, micros = micros, self._pop_micros()
                for i in order:
                    d_streams[i], d_partial = self._entry_backward(
                        after[i], d_streams[i], in_flight[i], i
                    )
                    in_flight[i] = self._body_backward(micros[i], d_partial, i)
                self._report_done(after)

            for i in order:
                (d_streams[i],) = self._entry_backward(micros[i], d_streams[i], in_flight[i], i)
            self._report_done(micros)
        return self.split.join(d_streams)

    def _backward_ends(self, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Run backward through the last residual sums; return the gradients of h and of y."""
        ends, self._ends = self._ends, []
        found = []
        for (tensors, output), part in zip(ends, self.split.micro_batches(gradient), strict=True):
            torch.autograd.backward(output, part)
            found.append(tensors.take_gradients())
        return [d_stream for d_stream, _ in found], [d_partial for _, d_partial in found]

    def _pop_micros(self) -> list[MicroSublayer]:
        """Return the last remaining micro-sublayers, recomputed if there is checkpointing."""
        # popped, so that activations are freed as backward proceeds
        inputs = self._inputs.pop()
        if not self.checkpoint:
            return self._computed.pop()

        micros: list[MicroSublayer] = []
        for i, source in enumerate(inputs):
            with source.replayed():
                micro = self._enter(source, i, "again")
                # nothing to launch: forward has already reduced the sum
                self._run_body(micro, micros, i, "again", lambda _: None)
            micros.append(micro)
        return micros

    def _body_backward(self, micro: MicroSublayer, d_partial: Tensor, i: int) -> Pending[Tensor]:
        """Compute dx, start and return its all-reduce, then compute the weights' gradients."""
        name = micro.sublayer.name
        self._trace_event("body backward", name, i)
        gradients = self.split.gradients(micro, d_partial)
        named = record_function(f"body backward {name} #{i}")
        with named, self.group.under_schedule() as recomputed:
            d_x = micro.backward_body(gradients)
        in_flight = self._launch(d_x, "backward", name, i)

        self._trace_event("weights backward", name, i)
        with record_function(f"weights backward {name} #{i}"):
            micro.backward_weights(recomputed)
        return in_flight

    def _entry_backward(
        self, micro: MicroSublayer, d_stream: Tensor, in_flight: Pending[Tensor], i: int
    ) -> list[Tensor]:
        """Land dx; run backward through norm and residual sum; return the gradients of h and y."""
        name = micro.sublayer.name
        d_x = self._land([in_flight], "backward", name, i)
        self._trace_event("enter backward", name, i)
        with record_function(f"enter backward {name} #{i}"):
            return micro.backward_entry(d_stream, d_x)

    # -- both

    def _launch(self, summand: Tensor, direction: str, name: str, i: int) -> Pending[Tensor]:
        """Start the in-place all-reduce of a partial sum or of a gradient."""
        self._trace_event(f"launch {direction}", name, i)
        tag = FORWARD_TAG if direction == "forward" else BACKWARD_TAG
        with record_function(f"launch {direction} {name} #{i}"):
            return self.group.all_reduce(summand, tag)

    def _land(self, in_flight: InFlight, direction: str, name: str, i: int) -> Tensor:
        """Wait for a micro-sublayer's all-reduces; return the sum, joined from its slices."""
        self._trace_event(f"land {direction}", name, i)
        with record_function(f"land {direction} {name} #{i}"):
            sums = [pending.wait() for pending in in_flight]
        return sums[0] if len(sums) == 1 else torch.cat(sums, -1)

    def _report_done(self, micros: Sequence[MicroSublayer]) -> None:
        """Call `done` with the sublayer, whose gradients are now complete."""
        if self.done is not None:
            self.done(micros[0].sublayer)

    def _trace_event(self, event: str, name: str, i: int) -> None:
        if self.trace is not None:
            self.trace(event, name, i)
