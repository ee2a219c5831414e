"""Compute the mean of the replicas' outer gradients (arXiv:2501.18512, section 2.4).

Each fragment uses the route in `comm.exchange` that sends fewer bytes: gather for two replicas and
for small fragments, otherwise two-phase, where the owner of a shard averages it and encodes the
mean again. Every replica, even that owner, decodes the same bytes, and values are added in replica
order, so the means are bit-identical. Replicas with NaN or Inf are excluded from the mean.

A message has these sections:

1. *header*, in the first phase only: the fields of `Header`, one int64 word each. A replica sends
   the same header with every shard, so all replicas have all headers after that phase, and keep
   them with the messages of the second phase (`Arrived`).
2. *norms*, in the second phase only: squared norms of the replicas' gradients and of their mean,
   restricted to the owner's shard.
3. *payload*: the encoded values.
4. *buffers*: averaged buffers, always in fp32, because a rounded variance could become zero.

On CUDA, encoding and the copy to host memory run on a side stream, and a background thread waits
for them and sends the message. When the other replicas' messages have arrived, that thread uploads
them and starts decoding them on the side stream, so that a landing only has to wait for an event
on the device. If the outer state is in host memory, they are decoded at the landing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.background import Background, on_host
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import MessageLayout, Route, View, routes
from lightning_commfree.comm.liveness import PeerWatch
from lightning_commfree.comm.requests import union
from lightning_commfree.diloco.codec import BLOCK, Codec, chunks, decode_all
from lightning_commfree.diloco.outer import WITHIN_TAG
from lightning_commfree.diloco.pace import Timing, agreed

TAG = "outer_gradient"


# -- headers


class Header(NamedTuple):
    """Metadata sent with a replica's values; creating it does not synchronize with the GPU."""

    requests: int  # bits of `comm.requests`
    step: int
    digest: Tensor | int  # hash of the sender's global copy; 0 if it is not compared
    nonfinite: Tensor | bool = False  # the values contain NaN or Inf
    changed: int = 0  # hash of the fragments that joined and the parameters that were frozen
    weight: int = 1  # weight of the values in the mean
    missed: int = 0  # number of batches without a step
    link: int = 0  # as in `pace.Timing`
    work: int = 0

    def on_device(self, values: Tensor) -> list[Tensor]:
        """Return `values` and the header's tensors that are on the same device."""
        tensors = [word for word in self if isinstance(word, Tensor)]
        return [values, *(word for word in tensors if word.device == values.device)]


class Position(NamedTuple):
    """Number of steps and skipped batches at which a replica launched a fragment."""

    step: int  # number of inner steps taken
    missed: int  # number of batches without a step


class HeaderSummary(NamedTuple):
    """Summary of the headers of all replicas in an exchange."""

    requests: int  # the union of all replicas' requests
    drifted: bool  # the hashes of the global copies differ
    steps_differ: bool  # the messages were sent after different steps or batches
    changes_differ: bool  # different fragments have joined, or different parameters were frozen
    nonfinite: tuple[int, ...]  # members whose values contain NaN or Inf
    weights: tuple[int, ...]  # one per member
    positions: tuple[Position, ...] = ()  # one per member
    timing: Timing = Timing()  # of the fragment on all members (`pace.agreed`)

    @property
    def counted(self) -> list[int]:
        """Indices of the members in the mean: not those with nonfinite values or with weight 0."""
        # neither rule applies if it would exclude everyone
        finite = [m for m in range(len(self.weights)) if m not in self.nonfinite]
        finite = finite or [*range(len(self.weights))]
        return [m for m in finite if self.weights[m]] or finite

    @property
    def counted_weights(self) -> list[int]:
        """Weights of the members in `counted`; all 1 if they are equal, even if they are 0."""
        weights = [self.weights[m] for m in self.counted]
        return weights if len({*weights}) > 1 else [1] * len(weights)


def summarize_headers(headers_MW: Tensor, together: bool = True) -> HeaderSummary:
    """Summarize the headers of all replicas: int64, shape (M, 9), in host memory.

    `together` is that of the route.
    """
    requests, step, digest, nonfinite, changed, weights, missed, *timings = headers_MW.T.tolist()
    positions = tuple(map(Position, step, missed))
    return HeaderSummary(
        requests=union(requests),
        drifted=len({*digest}) > 1,
        steps_differ=len({*positions}) > 1,
        changes_differ=len({*changed}) > 1,
        nonfinite=tuple(m for m, flag in enumerate(nonfinite) if flag),
        weights=tuple(weights),
        positions=positions,
        timing=agreed([Timing(*words) for words in zip(*timings, strict=True)], together),
    )


def counted_messages(messages: Tensor, counted: Sequence[int]) -> Tensor:
    """Select the messages of the members with indices `counted`, without blocking the host."""
    if len(counted) == len(messages):
        return messages
    # indexing with a list would copy the list to the device, and the host would wait
    return torch.stack([messages[m] for m in counted])


# -- messages


class FragmentMessage:
    """Layout of a message that contains a fragment or one of its shards.

    With `members=0` (first phase) it has a header, otherwise room for the norms of that many
    replicas and of their mean.
    """

    def __init__(self, codec: Codec, numel: int, num_buffers: int, members: int = 0) -> None:
        self._codec, self._numel = codec, numel
        self._layout = MessageLayout(
            header=0 if members else 8 * len(Header._fields),
            norms=4 * (members + 1) if members else 0,
            payload=codec.num_bytes(numel),
            buffers=4 * num_buffers,
        )
        self.num_bytes = self._layout.num_bytes

    def write(
        self,
        message: Tensor,  # uint8, shape (num_bytes,), on the device of `values`
        header: Header | None,
        values: Tensor,
        buffers: Tensor,
        norms: Tensor | None = None,
        residual: Tensor | None = None,  # receives the codec's rounding error
    ) -> None:
        """Write a header (first phase) or norms (second), values and buffers into `message`."""
        self._layout.clear_gaps(message)
        fields: tuple[Tensor | int, ...] = header or ()
        words = self._layout.section(message, "header", torch.int64)
        for word, value in zip(words, fields, strict=True):
            # neither `copy_` within a device nor `fill_` makes the host wait for the device
            on_device = isinstance(value, Tensor) and value.device == values.device
            word.copy_(value) if on_device else word.fill_(int(value))

        if norms is not None:
            room = self._layout.section(message, "norms", torch.float32)
            # fewer norms if replicas are excluded, but all messages must have the same size
            room.copy_(pad(norms, (0, len(room) - len(norms))))
        self._codec.encode(values, self._layout.section(message, "payload"), residual)
        self._layout.section(message, "buffers", torch.float32).copy_(buffers)

    def headers(self, messages: Tensor, peers: PeerWatch) -> Tensor:
        """Return the headers of M messages: int64, shape (M, 9), in host memory."""
        return on_host(self._layout.sections(messages, "header", torch.int64), peers)

    def norms(self, messages: Tensor) -> Tensor:
        """Return the squared norms in M messages: fp32, shape (M, M + 1)."""
        return self._layout.sections(messages, "norms", torch.float32)

    def buffers(self, messages: Tensor) -> Tensor:
        """Return the buffers in M messages: fp32, shape (M, num_buffers)."""
        return self._layout.sections(messages, "buffers", torch.float32)

    def values(self, messages: Tensor) -> Tensor:
        """Return the decoded values in M messages: fp32, shape (M, numel)."""
        shape = len(messages), self._numel
        values_MN = torch.empty(shape, dtype=torch.float32, device=messages.device)
        for message, row in zip(messages, values_MN, strict=True):
            decode_all(self._codec, self._layout.section(message, "payload"), row)
        return values_MN

    def average(
        self, messages: Tensor, weights: Sequence[int], padding: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Decode M messages; return the mean, and the squared norms of their values and the mean.

        Both are fp32, of shapes (numel,) and (M + 1,). The last `padding` values of each message
        are set to zero, because not every codec preserves zeros.
        """
        # chunk by chunk, so that all replicas' decoded values are never in memory at once
        size, device = len(messages), messages.device
        mean = torch.empty(self._numel, dtype=torch.float32, device=device)
        norms = torch.zeros(size + 1, dtype=torch.float32, device=device)
        payloads = [self._layout.section(message, "payload") for message in messages]

        buffer_MV: Tensor | None = None
        for chunk in chunks(self._numel, device):
            count = chunk.stop - chunk.start
            if buffer_MV is None:  # the first chunk is the largest
                buffer_MV = torch.empty(size, count, dtype=torch.float32, device=device)
            rows_MV = buffer_MV[:, :count]
            for payload, row in zip(payloads, rows_MV, strict=True):
                self._codec.decode(payload, self._numel, chunk, row)
            if (stop := self._numel - padding) < chunk.stop:
                rows_MV[:, max(stop - chunk.start, 0) :].zero_()

            _average(rows_MV, weights, out=mean[chunk])
            for total, row in zip(norms, (*rows_MV, mean[chunk]), strict=True):
                total += torch.dot(row, row)

        return mean, norms

    def average_buffers(self, messages: Tensor, weights: Sequence[int]) -> Tensor:
        """Return the mean of M messages' buffers, one weight each: fp32, shape (num_buffers,)."""
        rows_ME = self.buffers(messages)
        mean = _average(rows_ME, weights, out=torch.empty_like(rows_ME[0]))
        # values that are equal on all replicas, even Inf, are kept bit for bit
        return torch.where((rows_ME == rows_ME[0]).all(dim=0), rows_ME[0], mean)


def _average(rows_MN: Tensor, weights: Sequence[int], out: Tensor) -> Tensor:
    """Write the mean over the replicas to `out`, summing in replica order, and return it."""
    if len({*weights}) > 1:
        out.zero_()
        for row, weight in zip(rows_MN, weights, strict=True):
            out += row * (weight / sum(weights))
        return out
    torch.add(rows_MN[0], 0.0, out=out)  # start from 0.0: -0.0 becomes 0.0
    for row in rows_MN[1:]:
        out += row

    # a tensor, because CUDA multiplies by the rounded reciprocal of a Python number
    size = torch.full((), float(len(rows_MN)), dtype=torch.float32, device=out.device)
    return out.div_(size)


class Arrived(NamedTuple):
    """Messages received in an exchange, still encoded; a checkpoint saves the tensors."""

    headers: Tensor  # of all replicas: int64, shape (M, 9), in host memory
    messages: Tensor  # on the channel's device
    # if decoding has already begun on a CUDA device: returns the mean and the norms
    decoded: Callable[[], tuple[Tensor, ...]] | None = None
    link_s: float | None = None  # duration of the exchange, if it was measured


class Arrival(NamedTuple):
    """Result of an exchange, the same on all replicas."""

    mean: Tensor  # (N + E,), fp32, over the K replicas that are included
    # (K + 1,), fp32: squared norms of the replicas' outer gradients, as decoded, and of their mean
    norms: Tensor
    summary: HeaderSummary

    def shared_within(self, within: Channel) -> Arrival:
        """Return the result with flags, norms and timing of all ranks of the replica; collective.

        Collective within the replica. A flag or request is set if it is set on any rank, and
        squared norms are summed over the shards; the slowest rank's timing counts. The mean and the
        positions remain those of this rank.
        """
        flags = torch.tensor([*self.summary[:4], *self.summary.timing], dtype=torch.int64)
        parts = flags.float(), self.norms
        mine = torch.cat([part.to(within.device, non_blocking=True) for part in parts])
        rows = on_host(within.all_gather(mine, WITHIN_TAG).wait(), within.peers)

        drifted, steps_differ, changes_differ = rows[:, 1:4].any(dim=0).tolist()
        # `nonfinite` is already combined: ranks share the flag before the launch
        summary = self.summary._replace(
            requests=union([int(bits) for bits in rows[:, 0]]),
            drifted=drifted,
            steps_differ=steps_differ,
            changes_differ=changes_differ,
            timing=Timing(*map(int, rows[:, 4:6].amax(dim=0).tolist())),
        )
        return Arrival(self.mean, rows[:, 6:].sum(dim=0), summary)


def mean_cosine(norms: Tensor, weights: Sequence[int]) -> float:
    """Return the mean cosine similarity over all pairs of K outer gradients; 1 if K = 1.

    `norms` are the squared norms of the gradients and of their weighted mean, shape (K + 1,). Pair
    (i, j) counts with w_i w_j |g_i| |g_j|, for weights w and gradients g: long ones count more.
    """
    # With shares s = w / sum(w), the mean is sum(s_i g_i). Its squared norm is sum(s_i^2 |g_i|^2)
    # plus the inner products of all pairs, which would be s_i s_j |g_i| |g_j| at a cosine of 1.
    *squares, of_mean = norms.double().tolist()
    lengths = [w / sum(weights) * square**0.5 for w, square in zip(weights, squares, strict=True)]
    own = sum(length**2 for length in lengths)
    most = sum(lengths) ** 2 - own
    if len(lengths) == 1:
        return 1.0
    return (of_mean - own) / most if most else 0.0


# -- exchanges


@dataclass(eq=False)
class FragmentExchange:
    """Exchange of a fragment across replicas, with N parameter values and E buffer values."""

    route: Route
    codec: Codec  # of the parameter values
    numel: int  # N
    num_buffers: int  # E
    background: Background
    in_thread: bool = False  # launch gathers on the background thread too (`fragment_exchanges`)

    def __post_init__(self) -> None:
        size = self.route.num_shards
        # shards are whole blocks: a block in two shards would have two scales
        self._shard = -(-self.numel // (size * BLOCK)) * BLOCK if size > 1 else self.numel
        self._buffer_shard = -(-self.num_buffers // size)
        shape = self.codec, self._shard, self._buffer_shard
        self._up = FragmentMessage(*shape)
        self._down = FragmentMessage(*shape, members=self.route.view.size)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that this replica sends in each exchange of the fragment."""
        return self.route.bytes_up(self._up.num_bytes) + self.route.bytes_down(self._down.num_bytes)

    def launch(
        self,
        values: Tensor,  # fp32, shape (N + E,)
        header: Header,
        residual: Tensor | None = None,  # fp32, shape (N,); receives the codec's rounding error
        tag: str = TAG,  # in the ledger
        device: torch.device | None = None,  # of the global copy
    ) -> Pending[Arrived]:
        """Start to exchange this replica's values; return all messages as a `Pending`; collective.

        If `values` are on `device` but are sent from another one, the background thread starts
        decoding messages when they arrive.
        """
        # Who runs what: the training thread runs `write`, in `stage` with its kernels on a side
        # stream. The background thread runs the functions below; only if `in_thread` is false, in
        # one phase and on the channel's device, does the collective start right here. Whoever waits
        # for the result runs `_add_errors`.
        second_errors: list[Tensor] = []  # error of rounding the mean, in this replica's shard

        def timed_exchange(messages: Tensor) -> Arrived:
            begun_s = perf_counter()
            arrived = both_phases(messages)
            return arrived._replace(link_s=perf_counter() - begun_s)

        def both_phases(messages: Tensor) -> Arrived:
            arrived = self.arrived(self.route.up(messages, tag).wait())
            if not self.route.two_phase:
                return arrived
            reduced, error = self._reduce(arrived, self.route.shard, residual is not None)
            if error is not None and residual is not None:
                is_uploaded = residual.is_cuda and not error.is_cuda
                second_errors.append(error.pin_memory() if is_uploaded else error)
            return Arrived(arrived.headers, self.route.down(reduced, tag).wait())

        if values.device != self.route.view.channel.device:
            staged = self.background.staging.stage(
                lambda: self.write(values, header, residual), header.on_device(values)
            )

            def exchange_and_decode() -> Arrived:
                arrived = timed_exchange(staged())
                if device != values.device:  # for example, the outer state is in host memory
                    return arrived
                return arrived._replace(decoded=self._start_decoding(arrived, device))

            pending = self.background.submit(exchange_and_decode, tag, staged, values.device)
        else:
            messages = self.write(values, header, residual)
            if self.in_thread or self.route.two_phase:
                pending = self.background.submit(
                    lambda: timed_exchange(messages), tag, device=values.device
                )
            else:
                pending = self.route.up(messages, tag).then(self.arrived)

        if residual is None:
            return pending
        kept = residual
        return pending.then(lambda arrived: self._add_errors(arrived, second_errors, kept))

    def decode(self, arrived: Arrived, device: torch.device) -> Arrival:
        """Decode messages on `device` into an `Arrival`; the host does not wait for the device.

        The result is for use on the current stream.
        """
        mean, norms = (arrived.decoded or self._start_decoding(arrived, device))()
        return Arrival(mean, norms, summarize_headers(arrived.headers, self.route.together))

    def _start_decoding(
        self, arrived: Arrived, device: torch.device
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Start to decode on the side stream; return a function that returns the mean and norms."""
        summary = summarize_headers(arrived.headers)
        decode = self._read_reduced if self.route.two_phase else self._average
        return self.background.staging.upload(arrived.messages, device, partial(decode, summary))

    def arrived(self, received: Tensor) -> Arrived:
        """Return received messages, uint8, (M, bytes), together with their headers on the host."""
        return Arrived(self._up.headers(received, self.route.view.channel.peers), received)

    def _average(self, summary: HeaderSummary, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Average the messages of the K members in the mean: mean (N + E,) and norms (K + 1,)."""
        if self.route.num_shards == 1:
            mean, mean_buffers, norms_of_one = self._average_shard(summary, messages, 0)
            return _concatenate(mean, mean_buffers), norms_of_one
        by_shard = messages.view(len(messages), self.route.num_shards, -1).unbind(1)
        averaged = (self._average_shard(summary, one, s) for s, one in enumerate(by_shard))
        means, buffers, norms = zip(*averaged, strict=True)
        mean = torch.cat(means)[: self.numel]
        mean_buffers = torch.cat(buffers)[: self.num_buffers]
        return _concatenate(mean, mean_buffers), torch.stack(norms).sum(0)

    def _average_shard(
        self, summary: HeaderSummary, messages: Tensor, shard: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Average M messages about a shard; return the means of values and buffers, and norms."""
        counted, weights = counted_messages(messages, summary.counted), summary.counted_weights
        padding = max((shard + 1) * self._shard - self.numel, 0)
        mean, norms = self._up.average(counted, weights, padding)
        return mean, self._up.average_buffers(counted, weights), norms

    def _read_reduced(self, summary: HeaderSummary, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Assemble the mean and the norms of K members from all owners' messages."""
        values = self._down.values(messages).view(-1)[: self.numel]
        mean = _concatenate(values, self._down.buffers(messages).flatten()[: self.num_buffers])
        return mean, self._down.norms(messages).sum(0)[: len(summary.counted) + 1]

    def write(self, values: Tensor, header: Header, residual: Tensor | None) -> Tensor:
        """Return one message per shard, uint8, (S, bytes); `residual` receives the error."""
        size, numel = self.route.num_shards, self.numel
        values_SN = _rows(values[:numel], size, self._shard)
        buffers_SE = _rows(values[numel:], size, self._buffer_shard)
        errors_SN = None if residual is None else torch.empty_like(values_SN)

        shape = size, self._up.num_bytes
        messages = torch.empty(shape, dtype=torch.uint8, device=values.device)
        for s, message in enumerate(messages):
            error = None if errors_SN is None else errors_SN[s]
            self._up.write(message, header, values_SN[s], buffers_SE[s], residual=error)
        if residual is not None and errors_SN is not None:
            residual.copy_(errors_SN.view(-1)[:numel])
        return messages

    def _reduce(
        self, arrived: Arrived, shard: int, keep_error: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Average a shard; return the encoded mean, and K times its rounding error."""
        summary = summarize_headers(arrived.headers)
        mean, buffers, norms = self._average_shard(summary, arrived.messages, shard)
        message = torch.empty(self._down.num_bytes, dtype=torch.uint8, device=mean.device)
        error = torch.empty_like(mean) if keep_error else None
        self._down.write(message, None, mean, buffers, norms, error)
        # Only this replica corrects the error, and its gradient has weight 1/K in the next mean, so
        # keep K times the error.
        return message, None if error is None else error.mul_(len(summary.counted))

    def _add_errors(self, arrived: Arrived, errors: list[Tensor], residual: Tensor) -> Arrived:
        """Add the errors of rounding the mean of the own shard to `residual`; return `arrived`."""
        start = self.route.shard * self._shard
        for error in errors:
            shard = residual[start : start + self._shard]
            shard += error[: len(shard)].to(shard.device, non_blocking=True)
        return arrived


def _rows(values: Tensor, size: int, numel: int) -> Tensor:
    """Reshape `values` into `size` rows of length `numel`, padded with zeros."""
    missing = size * numel - len(values)
    return (pad(values, (0, missing)) if missing else values).view(size, numel)


def _concatenate(values: Tensor, buffers: Tensor) -> Tensor:
    return torch.cat([values, buffers]) if len(buffers) else values


def cheaper_exchange(
    view: View, codec: Codec, numel: int, num_buffers: int = 0, background: Background | None = None
) -> FragmentExchange:
    """Create an exchange on the route that sends fewer bytes.

    If `background` is None, use the exchange only to compute its size or to launch gathers.
    """
    background = background or Background(view.channel.ledger)
    exchanges = [
        FragmentExchange(route, codec, numel, num_buffers, background) for route in routes(view)
    ]
    return min(exchanges, key=lambda exchange: exchange.num_bytes)


def fragment_exchanges(
    view: View,
    codecs: Sequence[Codec],
    sizes: Sequence[tuple[int, int]],
    background: Background,
    in_thread: bool = False,
) -> list[list[FragmentExchange]]:
    """Return for each codec a list of exchanges, one per fragment, by `cheaper_exchange`.

    `sizes` are the fragments' numbers of parameter values and of buffer values. With `in_thread`,
    the background thread runs, and times, all of them.
    """
    by_codec = [
        [cheaper_exchange(view, codec, *size, background) for size in sizes] for codec in codecs
    ]
    # The order of collectives must be the same on all ranks. If fragment 0 uses two phases, the
    # background thread launches the second one when the first has arrived. A gather of fragment 1
    # from the training thread could come before that on one rank and after it on another. So if any
    # fragment uses two phases, gathers are launched on the background thread too.
    every = [exchange for exchanges in by_codec for exchange in exchanges]
    in_thread = in_thread or any(exchange.route.two_phase for exchange in every)
    for exchange in every:
        exchange.in_thread = in_thread
    return by_codec
