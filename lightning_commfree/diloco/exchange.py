"""Compute the mean of the replicas' outer gradients (arXiv:2501.18512, section 2.4).

Each fragment takes the route of `comm.exchange` that sends fewer bytes: gather for two replicas and
for small fragments, otherwise two-phase. Every replica, even the owner of a shard, decodes the same
bytes and adds them in replica order, so the means are bit-identical. On the two-phase route, the
codec rounds the mean again. Replicas with NaN or Inf are excluded from the mean.

A message has four sections:

1. *header*: three int64. First, flags (the sender requests a stop; its values contain NaN or Inf)
   and, in the bits above, a hash of the fragments that joined during the fit. Second, the sender's
   inner step. Third, a hash of its global copy (0: none). On the way down, the owner of a shard
   sends a summary of all headers.
2. *gram*, only down: inner products of all replicas' gradients, restricted to the owner's shard.
3. *payload*: the values as the codec encodes them.
4. *buffers*: averaged buffers, always in fp32, because a rounded variance could become zero.

On CUDA, encoding and the copy to host memory run on a side stream, and a background thread waits
for them and sends the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.background import Background, on_host
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import MessageLayout, Route, View, routes
from lightning_commfree.comm.liveness import PeerWatch
from lightning_commfree.diloco.codec import BLOCK, Codec, chunks, decode_all
from lightning_commfree.diloco.outer import WITHIN_TAG

TAG = "outer_gradient"
_STOP, _NONFINITE = 1, 2  # bits of the header's first word
_JOINED_SHIFT = 8  # first bit of the hash of the fragments that joined
JOINED_BITS = 40


# -- headers


class Header(NamedTuple):
    """Metadata sent with a replica's values; the host does not wait for its tensors."""

    stop: bool
    step: int
    digest: Tensor | int  # int64
    nonfinite: Tensor | bool = False  # the values contain NaN or Inf
    joined: int = 0  # hash of the fragments that joined during the fit; `JOINED_BITS` bits

    @property
    def words(self) -> tuple[Tensor | int, ...]:
        """The three int64 values that are sent."""
        flags = self.stop * _STOP + self.nonfinite * _NONFINITE
        return flags + (self.joined << _JOINED_SHIFT), self.step, self.digest

    def on_device(self, values: Tensor) -> list[Tensor]:
        """Return `values`, and those of the header's tensors that are on the same device."""
        tensors = [word for word in self if isinstance(word, Tensor)]
        return [values, *(word for word in tensors if word.device == values.device)]


class HeaderSummary(NamedTuple):
    """Summary of all replicas' headers."""

    stop: bool  # some replica asks all to stop
    drifted: bool  # the hashes of the global copies differ
    steps_differ: bool  # the messages were sent after different inner steps
    joined_differ: bool  # different fragments have joined
    nonfinite: tuple[int, ...]  # members whose values contain NaN or Inf


def summarize_headers(headers_M3: Tensor) -> HeaderSummary:
    """Summarize the headers of all replicas, int64, shape (M, 3), in host memory."""
    flags, steps, digests = headers_M3.unbind(1)
    drifted, steps_differ, joined_differ = (
        bool((words != words[0]).any()) for words in (digests, steps, flags >> _JOINED_SHIFT)
    )
    return HeaderSummary(_any_stops(flags), drifted, steps_differ, joined_differ, _nonfinite(flags))


def merge_summaries(headers_M3: Tensor) -> HeaderSummary:
    """Combine the summaries sent by all owners (`summary_header`)."""
    flags, drifted, steps_differ = headers_M3.unbind(1)
    seen = bool(drifted.any()), bool(steps_differ.any()), bool((flags >> _JOINED_SHIFT).any())
    return HeaderSummary(_any_stops(flags), *seen, _nonfinite(flags))


def summary_header(summary: HeaderSummary, member: int) -> Header:
    """Create the header with which the owner `member` sends its summary down."""
    # the fields `step` and `digest` are free on the way down; every member sends its own NaN flag
    step, digest, joined = summary.drifted, summary.steps_differ, summary.joined_differ
    return Header(summary.stop, int(step), int(digest), member in summary.nonfinite, int(joined))


def _any_stops(flags_M: Tensor) -> bool:
    return bool((flags_M & _STOP).any())


def _nonfinite(flags_M: Tensor) -> tuple[int, ...]:
    return tuple((flags_M & _NONFINITE).nonzero().flatten().tolist())


def finite_messages(messages: Tensor, nonfinite: Sequence[int]) -> Tensor:
    """Remove the messages of `nonfinite` members, or none if no message would remain."""
    counted = [m for m in range(len(messages)) if m not in nonfinite]
    if not 0 < len(counted) < len(messages):
        return messages
    # indexing with a list would copy the list to the device, and the host would wait
    return torch.stack([messages[m] for m in counted])


# -- messages


class FragmentMessage:
    """Layout of a message about a fragment or one of its shards.

    Args:
        codec: codec of the payload.
        numel: number of values in the payload.
        num_buffers: number of fp32 buffer values.
        gram_size: number of fp32 inner products.

    Attributes:
        num_bytes: size of the message.
    """

    def __init__(self, codec: Codec, numel: int, num_buffers: int, gram_size: int = 0) -> None:
        self._codec, self._numel = codec, numel
        self._layout = MessageLayout(
            header=3 * 8,
            gram=4 * gram_size,
            payload=codec.num_bytes(numel),
            buffers=4 * num_buffers,
        )
        self.num_bytes = self._layout.num_bytes

    def write(
        self,
        message: Tensor,
        header: Header,
        values: Tensor,
        buffers: Tensor,
        gram: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """Fill `message`: uint8, shape (num_bytes,), on the device of `values`."""
        self._layout.clear_gaps(message)
        words = self._layout.section(message, "header", torch.int64)
        for word, value in zip(words, header.words, strict=True):
            # neither `copy_` within a device nor `fill_` makes the host wait for the device
            on_device = isinstance(value, Tensor) and value.device == values.device
            word.copy_(value) if on_device else word.fill_(int(value))

        if gram is not None:
            self._layout.section(message, "gram", torch.float32).copy_(gram)
        self._codec.encode(values, self._layout.section(message, "payload"), residual)
        self._layout.section(message, "buffers", torch.float32).copy_(buffers)

    def headers(self, messages: Tensor, peers: PeerWatch) -> Tensor:
        """Return the headers of M messages: int64, shape (M, 3), in host memory."""
        return on_host(self._layout.sections(messages, "header", torch.int64), peers)

    def gram(self, messages: Tensor) -> Tensor:
        """Return the inner products in M messages: fp32, shape (M, gram_size)."""
        return self._layout.sections(messages, "gram", torch.float32)

    def buffers(self, messages: Tensor) -> Tensor:
        """Return the buffers in M messages: fp32, shape (M, num_buffers)."""
        return self._layout.sections(messages, "buffers", torch.float32)

    def values(self, messages: Tensor) -> Tensor:
        """Decode the values in M messages: fp32, shape (M, numel)."""
        shape = len(messages), self._numel
        values_MN = torch.empty(shape, dtype=torch.float32, device=messages.device)
        for message, row in zip(messages, values_MN, strict=True):
            decode_all(self._codec, self._layout.section(message, "payload"), row)
        return values_MN

    def average(self, messages: Tensor, padding: int = 0) -> tuple[Tensor, Tensor]:
        """Return the mean of the values, fp32, shape (numel,), and inner products, (M, M).

        The last `padding` values become zero: not every codec keeps zeros.
        """
        # chunk by chunk, so that decoded values of all replicas are never in memory at once
        size, device = len(messages), messages.device
        mean = torch.empty(self._numel, dtype=torch.float32, device=device)
        gram_MM = torch.zeros(size, size, dtype=torch.float32, device=device)
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

            _average(rows_MV, out=mean[chunk])
            for i, row in enumerate(rows_MV):  # row by row: BLAS is slow for so wide a matrix
                gram_MM[i, i:] += rows_MV[i:] @ row

        return mean, gram_MM.triu() + gram_MM.triu(diagonal=1).T

    def average_buffers(self, messages: Tensor) -> Tensor:
        """Return the mean of the buffers, fp32, shape (num_buffers,)."""
        rows_ME = self.buffers(messages)
        mean = _average(rows_ME, out=torch.empty_like(rows_ME[0]))
        # values that are equal on all replicas stay as they are, to the last bit, even Inf
        return torch.where((rows_ME == rows_ME[0]).all(dim=0), rows_ME[0], mean)


def _average(rows_MN: Tensor, out: Tensor) -> Tensor:
    """Write the mean over the replicas to `out`, summing in replica order."""
    torch.add(rows_MN[0], 0.0, out=out)  # start from 0.0: -0.0 becomes 0.0
    for row in rows_MN[1:]:
        out += row

    # a tensor, because CUDA multiplies by the rounded reciprocal of a Python number
    size = torch.full((), float(len(rows_MN)), dtype=torch.float32, device=out.device)
    return out.div_(size)


class Arrival(NamedTuple):
    """Result of an exchange, the same on all replicas."""

    mean: Tensor  # (N + E,), fp32, over the K replicas that are finite
    stop: bool  # these five as in `HeaderSummary`
    drifted: bool
    steps_differ: bool
    joined_differ: bool
    nonfinite: tuple[int, ...]
    gram: Tensor  # (K, K), fp32: inner products of the replicas' outer gradients, as decoded

    def shared_within(self, within: Channel) -> Arrival:
        """Combine the flags and inner products of a replica's ranks; collective within it."""
        flags = torch.tensor([self.stop, self.drifted, self.steps_differ, self.joined_differ])
        mine = torch.cat([flags.float(), self.gram.flatten().cpu()]).to(within.device)
        rows = on_host(within.all_gather(mine, WITHIN_TAG).wait(), within.peers)

        anywhere = rows[:, : len(flags)].any(dim=0).tolist()
        stop, drifted, steps_differ, joined_differ = (bool(flag) for flag in anywhere)
        # the inner product of full gradients is the sum of the inner products of their shards
        gram = rows[:, len(flags) :].sum(dim=0).view_as(self.gram)
        # `nonfinite` is already combined: ranks share the flag before the launch
        flagged = stop, drifted, steps_differ, joined_differ
        return Arrival(self.mean, *flagged, self.nonfinite, gram)

    @property
    def norm(self) -> float:
        """Euclidean norm of the mean outer gradient."""
        return float(self.gram.sum().clamp(min=0).sqrt()) / len(self.gram)

    @property
    def cosine(self) -> float:
        """Mean cosine similarity of the outer gradients over all pairs of replicas; 1 if K = 1."""
        norms_M = self.gram.diagonal().sqrt()
        cosines_MM = self.gram / torch.outer(norms_M, norms_M).clamp(min=1e-30)

        size = len(norms_M)
        pairs = size * (size - 1)
        return float((cosines_MM.sum() - cosines_MM.trace()) / pairs) if pairs else 1.0


# -- exchanges


@dataclass(eq=False)
class FragmentExchange:
    """Exchange of a fragment across replicas, with N parameter values and E buffer values.

    Args:
        route: route for messages between replicas.
        codec: codec of the parameter values.
        numel: N.
        num_buffers: E.
        background: thread for work that must not block training.
        in_thread: whether gathers are launched on the background thread too (`fragment_exchanges`).
    """

    route: Route
    codec: Codec
    numel: int
    num_buffers: int
    background: Background
    in_thread: bool = False

    def __post_init__(self) -> None:
        size, two_phase = self.route.num_shards, self.route.two_phase
        # shards are whole blocks: a block in two shards would have two scales
        self._shard = -(-self.numel // (size * BLOCK)) * BLOCK if two_phase else self.numel
        self._buffer_shard = -(-self.num_buffers // size)
        shape = self.codec, self._shard, self._buffer_shard
        self._up = FragmentMessage(*shape)
        self._down = FragmentMessage(*shape, gram_size=self.route.view.size**2)

    @property
    def num_bytes(self) -> int:
        """Bytes that this replica sends per exchange of the fragment, by the ledger's formulas."""
        return self.route.bytes_up(self._up.num_bytes) + self.route.bytes_down(self._down.num_bytes)

    def launch(
        self, values: Tensor, header: Header, residual: Tensor | None = None, tag: str = TAG
    ) -> Pending[Tensor]:
        """Send this replica's values.

        Args:
            values: fp32, shape (N + E,).
            header: metadata to send with them.
            residual: fp32, shape (N,); filled with the codec's rounding error.
            tag: ledger tag.

        Returns:
            The received messages, still encoded, on the channel's device. `read` decodes them, and
            checkpoints may contain them.
        """
        losses: list[Tensor] = []  # error of the second rounding, in the shard of this replica

        def exchange(messages: Callable[[], Tensor]) -> Tensor:
            received = self.route.up(messages(), tag).wait()
            if not self.route.two_phase:
                return received  # decoded when it lands, on the device of the global copy
            reduced, lost = self._reduce(received, residual is not None)
            if lost is not None:
                losses.append(lost)
            return self.route.down(reduced, tag).wait()

        if values.device != self.route.view.channel.device:
            staged = self.background.staging.stage(
                lambda: self._write(values, header, residual), header.on_device(values)
            )
            pending = self.background.submit(lambda: exchange(staged), tag, staged, values.device)
        else:
            messages = self._write(values, header, residual)
            if self.in_thread or self.route.two_phase:
                pending = self.background.submit(
                    lambda: exchange(lambda: messages), tag, device=values.device
                )
            else:
                pending = self.route.up(messages, tag)

        if residual is None:
            return pending
        kept = residual
        return pending.then(lambda arrived: self._add_losses(arrived, losses, kept))

    def read(self, arrived: Tensor, device: torch.device) -> Arrival:
        """Decode received messages on `device`."""
        if not self.route.two_phase:
            summary = summarize_headers(self._up.headers(arrived, self.route.view.channel.peers))
            on_device = finite_messages(arrived, summary.nonfinite).to(device)
            mean, gram_KK = self._up.average(on_device)
            return Arrival(
                _concatenate(mean, self._up.average_buffers(on_device)), *summary, gram_KK
            )

        summary = merge_summaries(self._down.headers(arrived, self.route.view.channel.peers))
        on_device = arrived.to(device)
        values = self._down.values(on_device).view(-1)[: self.numel]
        mean = _concatenate(values, self._down.buffers(on_device).flatten()[: self.num_buffers])
        # `or`: if no replica is finite, all of them count (`finite_messages`)
        size = self.route.view.size - len(summary.nonfinite) or self.route.view.size
        gram_KK = self._down.gram(on_device).sum(0)[: size**2].view(size, size)
        return Arrival(mean, *summary, gram_KK)

    def _write(self, values: Tensor, header: Header, residual: Tensor | None) -> Tensor:
        """Create one message per shard: uint8, shape (S, message bytes)."""
        size, numel = self.route.num_shards, self.numel
        values_SN = _rows(values[:numel], size, self._shard)
        buffers_SE = _rows(values[numel:], size, self._buffer_shard)
        lost_SN = None if residual is None else torch.empty_like(values_SN)

        shape = size, self._up.num_bytes
        messages = torch.empty(shape, dtype=torch.uint8, device=values.device)
        for s, message in enumerate(messages):
            lost = None if lost_SN is None else lost_SN[s]
            self._up.write(message, header, values_SN[s], buffers_SE[s], residual=lost)
        if residual is not None and lost_SN is not None:
            residual.copy_(lost_SN.view(-1)[:numel])
        return messages

    def _reduce(self, received: Tensor, keep_loss: bool) -> tuple[Tensor, Tensor | None]:
        """Average the shard that this replica owns; return the resulting message and its error."""
        summary = summarize_headers(self._up.headers(received, self.route.view.channel.peers))
        counted = finite_messages(received, summary.nonfinite)
        end = (self.route.shard + 1) * self._shard
        mean, gram_KK = self._up.average(counted, padding=max(end - self.numel, 0))
        # K < M if replicas are left out, but all messages must have the same size
        gram = pad(gram_KK.flatten(), (0, self.route.view.size**2 - gram_KK.numel()))

        message = torch.empty(self._down.num_bytes, dtype=torch.uint8, device=received.device)
        lost = torch.empty_like(mean) if keep_loss else None
        header = summary_header(summary, self.route.view.rank)
        self._down.write(message, header, mean, self._up.average_buffers(counted), gram, lost)
        # Only this replica corrects the error, by a gradient that counts 1/K in the next mean: so
        # keep K times the error.
        return message, None if lost is None else lost.mul_(len(counted))

    def _add_losses(self, arrived: Tensor, losses: list[Tensor], residual: Tensor) -> Tensor:
        """Add the second rounding error of this replica's shard to the residual."""
        start = self.route.shard * self._shard
        for loss in losses:
            shard = residual[start : start + self._shard]
            shard += loss[: len(shard)].to(shard.device)
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
    """Create the exchange on the route that sends fewer bytes; gather if the codec demands it.

    Without a `background`, it can only report its bytes and launch gathers.
    """
    background = background or Background(view.channel.ledger)
    exchanges = [
        FragmentExchange(route, codec, numel, num_buffers, background)
        for route in routes(view)
        if not (route.two_phase and getattr(codec, "gather_only", False))  # optional in a `Codec`
    ]
    return min(exchanges, key=lambda exchange: exchange.num_bytes)


def fragment_exchanges(
    view: View, codecs: Sequence[Codec], sizes: Sequence[tuple[int, int]], background: Background
) -> list[list[FragmentExchange]]:
    """Create the cheaper exchange for each codec and fragment; `sizes` contains each N and E."""
    by_codec = [
        [cheaper_exchange(view, codec, *size, background) for size in sizes] for codec in codecs
    ]
    # The order of collectives must be the same on all ranks. If fragment 0 takes two phases, the
    # background thread launches the second one when the first has arrived. A gather of fragment 1
    # from the training thread could come before that on one rank and after it on another. So if any
    # fragment takes two phases, gathers are launched on the background thread too.
    every = [exchange for exchanges in by_codec for exchange in exchanges]
    in_thread = any(exchange.route.two_phase for exchange in every)
    for exchange in every:
        exchange.in_thread = in_thread
    return by_codec


class Flight(NamedTuple):
    """A fragment that has been launched but has not landed."""

    exchange: FragmentExchange
    header: Header
    pending: Pending[Tensor]
    launched_s: float  # on the clock of `time.perf_counter`
    values: Tensor | None = None  # the sent values, fp32; kept only if members may change
    residual: Tensor | None = None

    @classmethod
    def launch(
        cls,
        exchange: FragmentExchange,
        values: Tensor,
        header: Header,
        residual: Tensor | None = None,
        tag: str = TAG,
        keep: bool = False,
    ) -> Flight:
        """Launch values; with `keep`, keep them so that they can be relaunched."""
        pending = exchange.launch(values, header, residual, tag)
        return cls(exchange, header, pending, perf_counter(), values if keep else None, residual)

    @classmethod
    def here(cls, exchange: FragmentExchange, header: Header, pending: Pending[Tensor]) -> Flight:
        """Create a flight from a checkpoint; its messages have already arrived."""
        return cls(exchange, header, pending, perf_counter())

    def relaunch(self, exchange: FragmentExchange) -> Flight:
        """Launch the same values again, using the exchange for the next view."""
        assert self.values is not None, "values are kept only if members may change"
        # encodes again, because other shards have other blocks; overwrites the lost residual
        pending = exchange.launch(self.values, self.header, self.residual)
        return self._replace(exchange=exchange, pending=pending)

    def seconds(self) -> float:
        """Return the time since the launch in seconds."""
        return perf_counter() - self.launched_s

    def receive(self, device: torch.device, within: Channel | None) -> Arrival:
        """Wait for the messages, decode them, and combine the results of a replica's ranks."""
        arrival = self.exchange.read(self.pending.wait(), device)
        if within is not None and within.size > 1:
            arrival = arrival.shared_within(within)
        return arrival
