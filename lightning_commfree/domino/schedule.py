"""Domino's schedule: the half-blocks of several micro-batches in turn, both ways.

K half-blocks, micro-batches i = 0 .. M - 1. Forward, for half-block k after k, for i after i:

1. *land* the sum of half-block k - 1 of micro-batch i,
2. *enter*: residual stream and norm of half-block k,
3. *body*: compute its partial sum,
4. *launch* the sum. It flies while the other micro-batches compute their half-block.

Where nothing lies between embedding and first block, the first half-block lands its sums.

Backward, for k from the last, for i from the last:

1. *land* dx of half-block k + 1 of micro-batch i,
2. *enter*, backward: through norm and residual stream to d(partial) of half-block k,
3. *body*, backward: dx of this rank and the gradients of the weights,
4. *launch* the sum of dx. It flies while the other micro-batches go through their half-block.

Autograd alone would play backward in the reverse order of forward, in which every all-reduce is
waited for right after its launch. So each piece here has a graph of its own, cut off at its
boundaries, and one autograd node for the whole stack plays them. No collective lies inside a piece:
with activation checkpointing a piece is computed again from its boundary and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from lightning_commfree.comm.channel import Pending
from lightning_commfree.domino.group import BACKWARD_TAG, FORWARD_TAG, TensorGroup, Trace
from lightning_commfree.domino.halves import Half
from lightning_commfree.domino.micro import Arguments, Launch, Shared, Split

Done = Callable[[Half], None]

EMBEDDING = "embedding"  # its name in the trace


@dataclass
class Piece:
    """One half-block of one micro-batch, between forward and backward."""

    half: Half
    before: Half | None  # whose sum comes in
    arguments: Arguments
    stream: Tensor  # h as it came, a leaf
    total: Tensor | None  # y as it came, a leaf; None at the beginning
    random: tuple[Any, Any] | None = None  # of a piece that is computed again
    entered: Tensor | None = None  # h + finish(y), with its graph
    normed: Tensor | None = None  # norm(h), with its graph
    x: Tensor | None = None  # the same, a leaf
    outputs: list[Tensor] = field(default_factory=list)  # of the body, with their graph
    shared: list[Shared] = field(default_factory=list)  # what later micro-batches use of it

    def forget(self) -> None:
        """Give graphs and values inside the piece up; they are computed again."""
        self.entered = self.normed = self.x = None
        self.outputs, self.shared = [], []


@dataclass
class Play:
    """One pass of one batch through the stack, forward and then backward.

    Args:
        halves: of the stack, in order.
        group: the tensor group.
        split: how the batch is divided, and the sums.
        checkpoint: compute pieces again in backward instead of keeping what is inside.
        trace: told of every launch, land and piece, with direction.
        done: told of a half-block when the gradients of its parameters are there.
        unsummed: what comes in are this rank's summands of the embedding.
    """

    halves: Sequence[Half]
    group: TensorGroup
    split: Split
    checkpoint: bool = False
    trace: Trace | None = None
    done: Done | None = None
    unsummed: bool = False
    pieces: list[list[Piece]] = field(default_factory=list)  # by half-block, by micro-batch
    ends: list[Piece] = field(default_factory=list)
    autocast: tuple[str, bool, torch.dtype] | None = None

    # -- forward

    def forward(self, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the stack's output, shape of `hidden`; nothing of it has a graph."""
        kind = hidden.device.type
        self.autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        streams = list(self.split.cut(hidden))
        given = self.split.cut_arguments(arguments, hidden)
        flying: list[list[Pending[Tensor]]] = [[] for _ in streams]
        cut = enumerate(streams) if self.unsummed else ()
        # copies, for one lands while another is in use
        sums = [self._launch(part.clone(), "forward", EMBEDDING, i) for i, part in cut]
        before: Half | None = None
        for half in self.halves:
            row: list[Piece] = []
            for i, own in enumerate(given):
                if before is None and sums:
                    streams[i] = self._land([sums[i]], "forward", EMBEDDING, i)
                total = self._total(flying[i], before, i)
                piece = Piece(half, before, own, _leaf(streams[i]), total)
                flying[i] = self._compute(piece, row, i)
                streams[i] = piece.entered.detach() if piece.entered is not None else streams[i]
                row.append(piece)
            if self.checkpoint:
                for piece in row:
                    piece.forget()
            self.pieces.append(row)
            before = half
        return self.split.join([self._end(streams, flying, i) for i in range(len(streams))])

    def _compute(self, piece: Piece, earlier: Sequence[Piece], i: int) -> list[Pending[Tensor]]:
        if self.checkpoint:
            piece.random = self.group.random_states(piece.stream.device)
        with torch.set_grad_enabled(not self.checkpoint):
            self._enter(piece, i, "forward")
            launched: list[Pending[Tensor]] = []

            def launch(partial: Tensor) -> None:
                launched.append(self._launch(partial.detach(), "forward", piece.half.name, i))

            self._body(piece, earlier, i, "forward", launch)
        return launched

    def _enter(self, piece: Piece, i: int, direction: str) -> None:
        self._tell(f"enter {direction}", piece.half.name, i)
        with record_function(f"enter {piece.half.name} #{i}"):
            piece.entered = _add(piece)
            piece.normed = piece.half.norm(piece.entered)
            piece.x = _leaf(piece.normed)

    def _body(
        self, piece: Piece, earlier: Sequence[Piece], i: int, direction: str, launch: Launch
    ) -> None:
        assert piece.x is not None, "`_enter` comes first"
        self._tell(f"body {direction}", piece.half.name, i)
        own = piece.half.draws_own()
        device = piece.x.device
        with (
            record_function(f"body {piece.half.name} #{i}"),
            self.group.playing(),
            self.group.own_random(device) if own else nullcontext(),
        ):
            self.split.run(piece, earlier, launch)

    def _total(self, flying: Sequence[Pending[Tensor]], half: Half | None, i: int) -> Tensor | None:
        return None if half is None else _leaf(self._land(flying, "forward", half.name, i))

    def _land(self, flying: Sequence[Pending[Tensor]], direction: str, name: str, i: int) -> Tensor:
        self._tell(f"land {direction}", name, i)
        with record_function(f"land {direction} {name} #{i}"):
            sums = [pending.wait() for pending in flying]
        return sums[0] if len(sums) == 1 else torch.cat(sums, -1)

    def _end(self, streams: list[Tensor], flying: list[list[Pending[Tensor]]], i: int) -> Tensor:
        last = self.halves[-1]
        total = self._total(flying[i], last, i)
        piece = Piece(last, last, {}, _leaf(streams[i]), total)
        with torch.enable_grad():
            piece.entered = _add(piece)
        self.ends.append(piece)
        return piece.entered.detach()

    # -- backward

    def backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient of `hidden`; those of the parameters are accumulated."""
        kind, enabled, dtype = self.autocast or ("cpu", False, torch.bfloat16)
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            d_streams, d_partials = [], []
            for end, part in zip(self.ends, self.split.cut(gradient), strict=True):
                d_stream, d_partial = _through([end.entered], [part], end)
                d_streams.append(d_stream)
                d_partials.append(d_partial)
            self.ends = []
            flying: list[Pending[Tensor] | None] = [None] * len(d_streams)
            after: list[Piece] = []
            while self.pieces:
                row = self.pieces.pop()
                if self.checkpoint:
                    self._again(row)
                for i in reversed(range(len(row))):
                    if after:
                        d_streams[i], d_partials[i] = self._leave(
                            after[i], d_streams[i], flying[i], i
                        )
                    flying[i] = self._body_backward(row[i], d_partials[i], i)
                self._told_done(after)
                after = row
            for i in reversed(range(len(after))):
                d_streams[i], _ = self._leave(after[i], d_streams[i], flying[i], i)
            self._told_done(after)
        return self.split.join(d_streams)

    def _body_backward(self, piece: Piece, d_partial: Tensor | None, i: int) -> Pending[Tensor]:
        assert piece.x is not None, "the piece has been computed"
        assert d_partial is not None, "a half-block before the end sends its sum on"
        self._tell("body backward", piece.half.name, i)
        gradients = self.split.gradients(piece, d_partial)
        with record_function(f"body backward {piece.half.name} #{i}"), self.group.playing():
            torch.autograd.backward(piece.outputs, gradients)
        piece.outputs, piece.shared = [], []
        d_x, piece.x = piece.x.grad, None
        assert d_x is not None, "the body depends on its input"
        return self._launch(d_x, "backward", piece.half.name, i)

    def _again(self, row: Sequence[Piece]) -> None:
        for i, piece in enumerate(row):
            assert piece.random is not None, "a piece that was forgotten"
            with self.group.replayed(piece.stream.device, piece.random):
                self._enter(piece, i, "again")
                self._body(piece, row[:i], i, "again", lambda _: None)

    def _leave(
        self, piece: Piece, d_stream: Tensor, flying: Pending[Tensor] | None, i: int
    ) -> tuple[Tensor, Tensor | None]:
        assert flying is not None, "dx has been launched"
        d_x = self._land([flying], "backward", piece.half.name, i)
        self._tell("enter backward", piece.half.name, i)
        with record_function(f"enter backward {piece.half.name} #{i}"):
            return _through([piece.entered, piece.normed], [d_stream, d_x], piece)

    def _launch(self, partial: Tensor, direction: str, name: str, i: int) -> Pending[Tensor]:
        self._tell(f"launch {direction}", name, i)
        tag = FORWARD_TAG if direction == "forward" else BACKWARD_TAG
        with record_function(f"launch {direction} {name} #{i}"):
            return self.group.all_reduce(partial, tag)

    def _told_done(self, row: Sequence[Piece]) -> None:
        if row and self.done is not None:
            self.done(row[0].half)

    def _tell(self, event: str, name: str, i: int) -> None:
        if self.trace is not None:
            self.trace(event, name, i)


class _Stack(torch.autograd.Function):
    """The whole stack as one node; `Play` plays its inside."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, play: Play, arguments: dict[str, Any]) -> Tensor:
        ctx.play = play
        return play.forward(hidden, arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            # the inside would add to the gradients of all parameters, asked for or not
            raise RuntimeError(
                "A model that is divided and scheduled cannot be differentiated by"
                " `torch.autograd.grad` or `backward(inputs=...)`: its blocks play their own"
                " backward, for all parameters. Call `backward()`, or use another strategy."
            )
        return ctx.play.backward(gradients[0]), None, None


def play(play: Play, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Run `hidden`, shape (B, T, H), through the stack.

    Args:
        play: a new one.
        hidden: the residual stream behind the embedding.
        arguments: what transformers passes to a block besides it, by name.

    Returns:
        The residual stream before the last norm; gradients flow back through it once.
    """
    if not hidden.requires_grad:  # frozen embeddings: the node must be in the graph all the same
        hidden = hidden.detach().requires_grad_()
    output: Tensor = _Stack.apply(hidden, play, arguments)  # type: ignore[no-untyped-call]
    return output


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _add(piece: Piece) -> Tensor:
    if piece.total is None:
        return piece.stream.view_as(piece.stream)  # a graph of its own, down to the leaf
    assert piece.before is not None, "a sum comes from somewhere"
    return piece.stream + piece.before.finish(piece.total)


def _through(
    outputs: Sequence[Tensor | None], gradients: Sequence[Tensor], piece: Piece
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of what came into a piece; its graph is used up."""
    torch.autograd.backward([o for o in outputs if o is not None], list(gradients))
    d_stream = piece.stream.grad
    d_total = None if piece.total is None else piece.total.grad
    piece.entered = piece.normed = None
    piece.stream.grad = None
    assert d_stream is not None, "the residual stream goes through every piece"
    return d_stream, d_total
