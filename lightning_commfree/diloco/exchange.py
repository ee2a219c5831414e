"""How replicas form the mean of their outer gradients (arXiv:2501.18512, section 2.4).

`comm.exchange` describes the two routes; the cheaper one in bytes is taken for each fragment,
headers and padding included: the gather for two replicas, two phases from three on, except for
small fragments. On either route every replica, the owner of a shard too, decodes the same bytes and
adds in the order of the replicas, so the means are bit-identical everywhere. In two phases the mean
is rounded by the codec a second time.

A message has four sections:

1. *header*: three int64. Flags (the sender wants all to stop; its values hold NaN or Inf) and,
   above them, a hash of the fragments that joined during the fit; the sender's inner step; a hash
   of its global copy (0: none). On the way down the owner reports what it saw in all headers.
2. *gram*, down only: the owner's part of the inner products of all replicas' gradients.
3. *payload*: the values as the codec encodes them.
4. *buffers*: averaged buffers, in fp32 on every wire. They are statistics: a rounded variance may
   be zero. Where all replicas hold the same number, that number is the mean to the last bit.

A replica with NaN or Inf is left out of the mean: the sum is divided by the number of the others.

A CUDA device encodes on a stream of its own. Where the channel needs the codes in host memory, they
are copied on that stream, and a thread beside the training waits for them and sends them.

An exchange belongs to one view. If a member is lost, the flight is launched again in the next view
(`Flight.relaunch`): the values are encoded again, because other shards make other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.background import Background, Staging
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.exchange import MessageLayout, Route, routes
from lightning_commfree.comm.view import View
from lightning_commfree.diloco.codec import BLOCK, Codec, chunks, decode_all
from lightning_commfree.diloco.outer import WITHIN_TAG

TAG = "outer_gradient"
_STOP, _NONFINITE = 1, 2  # bits of the header's first word
_JOINED_FROM = 8  # the hash of what has joined is above them
JOINED_BITS = 40


# -- headers


class Header(NamedTuple):
    """What travels ahead of a replica's values; the host does not wait for tensors in it."""

    stop: bool
    step: int
    digest: Tensor | int  # int64
    nonfinite: Tensor | bool = False  # the values hold NaN or Inf
    joined: int = 0  # hash of the fragments that joined during the fit; `JOINED_BITS` bits

    @property
    def words(self) -> tuple[Tensor | int, ...]:
        """The three int64 that travel."""
        flags = self.stop * _STOP + self.nonfinite * _NONFINITE
        return flags + (self.joined << _JOINED_FROM), self.step, self.digest

    def on_device(self, values: Tensor) -> list[Tensor]:
        """Return the values, and the header's tensors that are on the same device."""
        tensors = [word for word in self if isinstance(word, Tensor)]
        return [values, *(word for word in tensors if word.device == values.device)]


class HeaderSummary(NamedTuple):
    """All replicas' headers together."""

    stop: bool  # some replica wants to stop
    drifted: bool  # the hashes of the global copies differ
    steps_differ: bool
    joined_differ: bool  # not the same fragments have joined
    nonfinite: tuple[int, ...]  # members whose values hold NaN or Inf


def summarize_headers(headers_M3: Tensor) -> HeaderSummary:
    """Summarize the headers of all replicas; int64, shape (M, 3), in host memory."""
    flags, steps, digests = headers_M3.unbind(1)
    drifted, steps_differ, joined_differ = (
        bool((words != words[0]).any()) for words in (digests, steps, flags >> _JOINED_FROM)
    )
    return HeaderSummary(_any_stops(flags), drifted, steps_differ, joined_differ, _nonfinite(flags))


def merge_summaries(headers_M3: Tensor) -> HeaderSummary:
    """Summarize headers in which each owner reports what it saw (`report`)."""
    flags, drifted, steps_differ = headers_M3.unbind(1)
    seen = bool(drifted.any()), bool(steps_differ.any()), bool((flags >> _JOINED_FROM).any())
    return HeaderSummary(_any_stops(flags), *seen, _nonfinite(flags))


def report(summary: HeaderSummary, place: int) -> Header:
    """Return a header that tells what its sender, member `place`, saw in the first phase.

    The step stands for "drifted", the digest for "steps differ". Only the sender's own NaN is in
    it: the other members report theirs.
    """
    own, joined_differ = place in summary.nonfinite, int(summary.joined_differ)
    return Header(summary.stop, int(summary.drifted), int(summary.steps_differ), own, joined_differ)


def _any_stops(flags_M: Tensor) -> bool:
    return bool((flags_M & _STOP).any())


def _nonfinite(flags_M: Tensor) -> tuple[int, ...]:
    return tuple((flags_M & _NONFINITE).nonzero().flatten().tolist())


def counted_messages(messages: Tensor, nonfinite: Sequence[int]) -> Tensor:
    """Return the messages without those of `nonfinite`; all of them if no other is left."""
    counted = [m for m in range(len(messages)) if m not in nonfinite]
    if not 0 < len(counted) < len(messages):
        return messages
    # indexing with a list would copy it to the device while the host waits
    return torch.stack([messages[m] for m in counted])


# -- messages


class FragmentMessage:
    """One message about a fragment, or about one shard of it, as bytes.

    Args:
        codec: of the payload.
        numel: values in the payload.
        num_buffers: fp32 values of buffers behind it.
        gram_size: fp32 values of inner products in front of it.

    Attributes:
        num_bytes: of the message.
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
        """Fill `message`, uint8, shape (num_bytes,), on the device of `values`."""
        self._layout.clear_gaps(message)
        words = self._layout.section(message, "header", torch.int64)
        for word, value in zip(words, header.words, strict=True):
            # neither makes the host wait for the device
            on_device = isinstance(value, Tensor) and value.device == values.device
            word.copy_(value) if on_device else word.fill_(int(value))

        if gram is not None:
            self._layout.section(message, "gram", torch.float32).copy_(gram)
        self._codec.encode(values, self._layout.section(message, "payload"), residual)
        self._layout.section(message, "buffers", torch.float32).copy_(buffers)

    def headers(self, messages: Tensor) -> Tensor:
        """Return the headers of messages: int64, shape (M, 3), in host memory."""
        return self._layout.sections(messages, "header", torch.int64).cpu()

    def gram(self, messages: Tensor) -> Tensor:
        """Return the inner products in messages: fp32, shape (M, gram_size)."""
        return self._layout.sections(messages, "gram", torch.float32)

    def buffers(self, messages: Tensor) -> Tensor:
        """Return the buffers in messages: fp32, shape (M, num_buffers)."""
        return self._layout.sections(messages, "buffers", torch.float32)

    def values(self, messages: Tensor) -> Tensor:
        """Decode messages: fp32, shape (M, numel)."""
        shape = len(messages), self._numel
        values_MN = torch.empty(shape, dtype=torch.float32, device=messages.device)
        for message, row in zip(messages, values_MN, strict=True):
            decode_all(self._codec, self._layout.section(message, "payload"), row)
        return values_MN

    def average(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of the values, fp32, shape (numel,), and inner products, (M, M).

        Chunk by chunk: the decoded values of all replicas need not exist at once.
        """
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

            _average(rows_MV, out=mean[chunk])
            for i, row in enumerate(rows_MV):  # not all at once: BLAS is slow at so flat a product
                gram_MM[i, i:] += rows_MV[i:] @ row

        return mean, gram_MM.triu() + gram_MM.triu(diagonal=1).T

    def average_buffers(self, messages: Tensor) -> Tensor:
        """Return the mean of the buffers; what all replicas hold, Inf included, is kept."""
        rows_ME = self.buffers(messages)
        mean = _average(rows_ME, out=torch.empty_like(rows_ME[0]))
        return torch.where((rows_ME == rows_ME[0]).all(dim=0), rows_ME[0], mean)


def _average(rows_MN: Tensor, out: Tensor) -> Tensor:
    """Write the mean over the replicas into `out`; the sum runs in their order."""
    torch.add(rows_MN[0], 0.0, out=out)  # like a sum from zero: -0.0 becomes 0.0
    for row in rows_MN[1:]:
        out += row

    # by a tensor: a CUDA device would multiply by the rounded reciprocal of a Python number
    size = torch.full((), float(len(rows_MN)), dtype=torch.float32, device=out.device)
    return out.div_(size)


class Arrival(NamedTuple):
    """The result of an exchange; the same on all replicas."""

    mean: Tensor  # (N + E,), fp32, over the K replicas that are finite
    stop: bool  # some replica wants to stop
    drifted: bool  # the hashes of the global copies differ
    steps_differ: bool  # the messages are of different inner steps
    joined_differ: bool  # not the same fragments have joined
    nonfinite: tuple[int, ...]  # members whose values hold NaN or Inf
    gram: Tensor  # (K, K), fp32: inner products of the replicas' outer gradients, as decoded

    def shared_within(self, within: Channel) -> Arrival:
        """Combine what the ranks of a replica have received, each for its shard.

        Collective within the replica. The mean remains that of the rank's own shard.
        """
        flags = torch.tensor([self.stop, self.drifted, self.steps_differ, self.joined_differ])
        mine = torch.cat([flags.float(), self.gram.flatten().cpu()]).to(within.device)
        rows = within.all_gather(mine, WITHIN_TAG).wait().cpu()

        anywhere = rows[:, : len(flags)].any(dim=0).tolist()
        stop, drifted, steps_differ, joined_differ = (bool(flag) for flag in anywhere)
        gram = rows[:, len(flags) :].sum(dim=0).view_as(self.gram)
        # `nonfinite` is of whole replicas: the flag was shared before the launch
        seen = stop, drifted, steps_differ, joined_differ
        return Arrival(self.mean, *seen, self.nonfinite, gram)

    @property
    def norm(self) -> float:
        """Euclidean norm of the mean outer gradient."""
        return float(self.gram.sum().clamp(min=0).sqrt()) / len(self.gram)

    @property
    def cosine(self) -> float:
        """Cosine similarity of two replicas' outer gradients, mean over all pairs; 1 for K = 1."""
        norms_M = self.gram.diagonal().sqrt()
        cosines_MM = self.gram / torch.outer(norms_M, norms_M).clamp(min=1e-30)

        size = len(norms_M)
        pairs = size * (size - 1)
        return float((cosines_MM.sum() - cosines_MM.trace()) / pairs) if pairs else 1.0


# -- exchanges


@dataclass(eq=False)
class FragmentExchange:
    """The exchange of fragments of one size in one view: N values and E buffer values.

    Args:
        route: between the replicas.
        codec: of the values.
        numel: N.
        num_buffers: E.
        background: runs what the training must not wait for.
        staging: the CUDA stream that encodes; exchanges share it, and so its memory.
        in_thread: launch in the background's thread on either route (`fragment_exchanges`).
    """

    route: Route
    codec: Codec
    numel: int
    num_buffers: int
    background: Background
    staging: Staging
    in_thread: bool = False

    def __post_init__(self) -> None:
        size, two_phase = self.route.num_shards, self.route.two_phase
        # shards are whole blocks: a block that crossed a border would have two scales
        self._shard = -(-self.numel // (size * BLOCK)) * BLOCK if two_phase else self.numel
        self._buffer_shard = -(-self.num_buffers // size)
        shape = self.codec, self._shard, self._buffer_shard
        self._up = FragmentMessage(*shape)
        self._down = FragmentMessage(*shape, gram_size=self.route.view.size**2)

    @property
    def num_bytes(self) -> int:
        """Bytes that this replica sends for one fragment, by the ledger's formulas."""
        return self.route.bytes_up(self._up.num_bytes) + self.route.bytes_down(self._down.num_bytes)

    def launch(
        self, values: Tensor, header: Header, residual: Tensor | None = None, tag: str = TAG
    ) -> Pending[Tensor]:
        """Send this replica's values.

        Args:
            values: fp32, shape (N + E,).
            header: travels ahead of them.
            residual: fp32, shape (N,); filled with what the codec's roundings lose of the values.
            tag: the ledger counts the bytes under it.

        Returns:
            What arrives: encoded as it travelled, in the channel's memory. It can be kept, saved
            and read later.
        """
        losses: list[Tensor] = []  # of the second rounding, by this replica as an owner

        def carry(messages: Callable[[], Tensor]) -> Tensor:
            received = self.route.up(messages(), tag).wait()
            if not self.route.two_phase:
                return received  # decoded at the landing, on the device of the global copy
            reduced, lost = self._reduce(received, residual is not None)
            if lost is not None:
                losses.append(lost)
            return self.route.down(reduced, tag).wait()

        if values.device != self.route.view.channel.device:
            staged = self.staging.stage(
                lambda: self._write(values, header, residual), header.on_device(values)
            )
            pending = self.background.submit(lambda: carry(staged), tag, staged)
        else:
            messages = self._write(values, header, residual)
            if self.in_thread or self.route.two_phase:
                pending = self.background.submit(lambda: carry(lambda: messages), tag)
            else:
                pending = self.route.up(messages, tag)

        if residual is None:
            return pending
        kept = residual
        return pending.then(lambda arrived: self._add_losses(arrived, losses, kept))

    def read(self, arrived: Tensor, device: torch.device) -> Arrival:
        """Decode on `device` what arrived."""
        if not self.route.two_phase:
            summary = summarize_headers(self._up.headers(arrived))
            on_device = counted_messages(arrived, summary.nonfinite).to(device)
            mean, gram_KK = self._up.average(on_device)
            return Arrival(_joined(mean, self._up.average_buffers(on_device)), *summary, gram_KK)

        summary = merge_summaries(self._down.headers(arrived))
        on_device = arrived.to(device)
        values = self._down.values(on_device).view(-1)[: self.numel]
        mean = _joined(values, self._down.buffers(on_device).flatten()[: self.num_buffers])
        size = self.route.view.size - len(summary.nonfinite) or self.route.view.size
        gram_KK = self._down.gram(on_device).sum(0)[: size**2].view(size, size)
        return Arrival(mean, *summary, gram_KK)

    def _write(self, values: Tensor, header: Header, residual: Tensor | None) -> Tensor:
        """Return the messages about all shards: uint8, shape (S, u)."""
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
        """Average the shard that this replica owns.

        Returns:
            The message about it, shape (d,), and what its rounding lost, for all replicas.
        """
        summary = summarize_headers(self._up.headers(received))
        counted = counted_messages(received, summary.nonfinite)
        mean, gram_KK = self._up.average(counted)
        gram = pad(gram_KK.flatten(), (0, self.route.view.size**2 - gram_KK.numel()))

        message = torch.empty(self._down.num_bytes, dtype=torch.uint8, device=received.device)
        lost = torch.empty_like(mean) if keep_loss else None
        header = report(summary, self.route.view.place)
        self._down.write(message, header, mean, self._up.average_buffers(counted), gram, lost)
        # every replica misses it, and the owner's next gradient is divided by their number
        return message, None if lost is None else lost.mul_(len(counted))

    def _add_losses(self, arrived: Tensor, losses: list[Tensor], residual: Tensor) -> Tensor:
        """Add what this replica lost as an owner to its residual; in the thread that waits."""
        start = self.route.shard * self._shard
        for loss in losses:
            part = residual[start : start + self._shard]
            part += loss[: len(part)].to(part.device)
        return arrived


def _rows(values: Tensor, size: int, numel: int) -> Tensor:
    """Return `values` in rows of `numel`, the last ones filled with zeros."""
    missing = size * numel - len(values)
    return (pad(values, (0, missing)) if missing else values).view(size, numel)


def _joined(values: Tensor, buffers: Tensor) -> Tensor:
    return torch.cat([values, buffers]) if len(buffers) else values


def cheaper_exchange(
    view: View, codec: Codec, numel: int, num_buffers: int = 0, background: Background | None = None
) -> FragmentExchange:
    """Return the exchange on the route that sends fewer bytes; arguments as `FragmentExchange`.

    Without a `background` it can tell its bytes and launch a gather, no more.
    """
    background = background or Background(view.channel.ledger)
    both = [
        FragmentExchange(route, codec, numel, num_buffers, background, Staging())
        for route in routes(view)
    ]
    return min(both, key=lambda exchange: exchange.num_bytes)


def fragment_exchanges(
    view: View, codec: Codec, sizes: Sequence[tuple[int, int]], background: Background
) -> list[FragmentExchange]:
    """Return the cheaper exchange for each of several fragments, which may be in flight together.

    `sizes` are N and E of each. Why a gather may have to use the thread:

    1. Fragment 0 takes two phases: the thread launches the second when the first has arrived.
    2. Fragment 1, which is gathered, is launched meanwhile: before that second phase on one rank,
       after it on another. So the thread launches this one too, when its turn comes.
    """
    exchanges = [cheaper_exchange(view, codec, *size, background) for size in sizes]
    in_thread = any(exchange.route.two_phase for exchange in exchanges)
    for exchange in exchanges:
        exchange.in_thread = in_thread
        exchange.staging = exchanges[0].staging
    return exchanges


class Flight(NamedTuple):
    """A fragment that has been launched and not landed."""

    exchange: FragmentExchange
    header: Header
    pending: Pending[Tensor]
    launched_s: float  # on the clock of `time.perf_counter`
    values: Tensor | None = None  # what left, in fp32; kept only where members may change
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
        """Launch values; `keep` them for a relaunch."""
        pending = exchange.launch(values, header, residual, tag)
        return cls(exchange, header, pending, perf_counter(), values if keep else None, residual)

    @classmethod
    def here(cls, exchange: FragmentExchange, header: Header, pending: Pending[Tensor]) -> Flight:
        """Return a flight that has arrived: one that a checkpoint was saved in the middle of."""
        return cls(exchange, header, pending, perf_counter())

    def relaunch(self, exchange: FragmentExchange) -> Flight:
        """Launch the same values again, by the exchange of another view.

        The residual is filled again: what the lost exchange rounded away never landed.
        """
        assert self.values is not None, "values are kept where members may change"
        pending = exchange.launch(self.values, self.header, self.residual)
        return self._replace(exchange=exchange, pending=pending)

    def seconds(self) -> float:
        """Return the seconds since the launch."""
        return perf_counter() - self.launched_s

    def receive(self, device: torch.device, within: Channel | None) -> Arrival:
        """Wait for the messages and decode them; the ranks of a replica combine theirs."""
        arrival = self.exchange.read(self.pending.wait(), device)
        if within is not None and within.size > 1:
            arrival = arrival.shared_within(within)
        return arrival
