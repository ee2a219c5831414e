"""How replicas form the mean of their outer gradients (arXiv:2501.18512, section 2.4).

N values, M replicas, b bytes for the values in their wire format:

=========  ================================================================  ===================
way        what travels                                                      a replica sends
=========  ================================================================  ===================
gather     every replica's encoded gradient to every other one               b (M - 1)
by shards  each replica gets one shard of all gradients, averages it in      2 b (M - 1) / M
           fp32, encodes the mean once more and sends it to all
=========  ================================================================  ===================

The cheaper one in bytes is taken, headers and padding included: gather up to M = 2, shards from
there on, except for small fragments. Either way everybody, the shard's owner too, decodes the same
bytes and adds in the order of the replicas: the means are bit-identical everywhere. By shards, the
mean is rounded to the wire format a second time.

Averaged buffers come behind the values, in fp32 and in either way exactly once: statistics have to
stay what they are (a rounded variance may be zero), and are few. Where all replicas hold the same
number, that is the mean to the last bit. N counts the values in the wire format alone.

A *header* of three int64 goes ahead of the values:

1. flags: the sender wants all to stop; its values hold NaN or Inf. Behind them a digest of what no
   fragment holds (`late_parameters`).
2. its inner step;
3. a digest of its global copy (0: none).

The second message of the exchange by shards says what its sender saw in all headers, and carries
its part of the gradients' inner products. A replica with NaN or Inf is left out of the mean: the
others are divided by their own number.

A CUDA device encodes its values on a stream of their own. Where the channel wants the codes on the
host, they come down on that stream, and a thread beside the training waits for them and sends them.

One message of an exchange: what stands where in its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.background import Background, Staging
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import all_gather_bytes, all_to_all_bytes
from lightning_commfree.diloco.codec import BLOCK, WireFormat, chunks, decode
from lightning_commfree.diloco.outer import REPLICA_TAG

_HEADER_BYTES = 3 * 8
_STOP, _NONFINITE = 1, 2  # bits of the first word
_LATE_FROM = 8


class Header(NamedTuple):
    """What travels ahead of a replica's values; tensors in it are not waited for."""

    stop: bool
    step: int
    digest: Tensor | int  # int64
    nonfinite: Tensor | bool = False  # the values hold NaN or Inf
    late_digest: Tensor | int = 0  # of what no fragment holds, and of what has joined; 40 bits

    @property
    def words(self) -> tuple[Tensor | int, ...]:
        """As it travels: flags and late digest, step, digest."""
        flags = self.stop * _STOP + self.nonfinite * _NONFINITE
        first = flags + (self.late_digest << _LATE_FROM)
        return first, self.step, self.digest

    def on_device(self, values: Tensor) -> list[Tensor]:
        """Return the values and those tensors of the header that live beside them."""
        beside = [word for word in self if isinstance(word, Tensor)]
        return [values, *(word for word in beside if word.device == values.device)]


class HeaderSummary(NamedTuple):
    """What all headers say together."""

    stop: bool  # somebody wants to stop
    drifted: bool  # the digests differ
    steps_differ: bool
    late_differs: bool  # what no fragment holds, or what has joined
    nonfinite: tuple[int, ...]  # replicas whose values hold NaN or Inf


class MessageLayout:
    """Header, extra floats, payload, exact floats: one message of a fixed size, in 8-byte words.

    Args:
        wire: format of the payload.
        numel: how many values the payload has.
        exact_floats: how many fp32 numbers, buffers, come behind them as they are.
        extra_floats: how many come ahead of them.

    Attributes:
        num_bytes: of the message.
    """

    def __init__(
        self, wire: WireFormat, numel: int, exact_floats: int, extra_floats: int = 0
    ) -> None:
        self._wire, self._numel = wire, numel
        self._payload_at = _HEADER_BYTES + -(-4 * extra_floats // 8) * 8
        self._extra_end = _HEADER_BYTES + 4 * extra_floats
        self._payload_end = self._payload_at + wire.num_bytes(numel)
        self._exact_at = -(-self._payload_end // 8) * 8
        self._exact_end = self._exact_at + 4 * exact_floats
        self.num_bytes = -(-self._exact_end // 8) * 8

    def write(
        self, values: Tensor, exact: Tensor, header: Header, extra: Tensor | None = None
    ) -> Tensor:
        """Return a message: uint8, shape (num_bytes,), on the device of `values`."""
        message = torch.empty(self.num_bytes, dtype=torch.uint8, device=values.device)
        message[: self._payload_at].zero_()
        message[self._payload_end :].zero_()

        for word, value in zip(
            message[:_HEADER_BYTES].view(torch.int64), header.words, strict=True
        ):
            on_device = isinstance(value, Tensor) and value.device == values.device
            word.copy_(value) if on_device else word.fill_(int(value))  # neither is waited for

        if extra is not None:
            message[_HEADER_BYTES : self._extra_end].view(torch.float32).copy_(extra)

        self._wire.encode(values, out=message[self._payload_at : self._payload_end])
        message[self._exact_at : self._exact_end].view(torch.float32).copy_(exact)
        return message

    def headers(self, messages: Tensor) -> Tensor:
        """Return the headers of messages: int64, shape (M, 3), in host memory."""
        return torch.stack([row[:_HEADER_BYTES].view(torch.int64) for row in messages]).cpu()

    def extra(self, messages: Tensor) -> Tensor:
        """Return the extra floats of messages: shape (M, extra_floats)."""
        rows = [row[_HEADER_BYTES : self._extra_end].view(torch.float32) for row in messages]
        return torch.stack(rows)

    def exact(self, messages: Tensor) -> Tensor:
        """Return the exact floats of messages: shape (M, exact_floats)."""
        rows = [row[self._exact_at : self._exact_end].view(torch.float32) for row in messages]
        return torch.stack(rows)

    def values(self, messages: Tensor) -> Tensor:
        """Decode messages: fp32, shape (M, numel)."""
        shape = len(messages), self._numel
        values_MN = torch.empty(shape, dtype=torch.float32, device=messages.device)

        for message, row in zip(messages, values_MN, strict=True):
            decode(self._wire, self._payload(message), row)
        return values_MN

    def average(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values' mean, fp32, shape (numel,), and inner products, (M, M).

        Chunk by chunk: the decoded values of all replicas need not exist at once.
        """
        size, device = len(messages), messages.device
        mean = torch.empty(self._numel, dtype=torch.float32, device=device)
        gram_MM = torch.zeros(size, size, dtype=torch.float32, device=device)

        buffer_MV: Tensor | None = None
        for chunk in chunks(self._numel, device):
            if buffer_MV is None:  # the first chunk is the largest
                buffer_MV = torch.empty(size, chunk.numel, dtype=torch.float32, device=device)
            rows_MV = buffer_MV[:, : chunk.numel]
            for message, row in zip(messages, rows_MV, strict=True):
                self._wire.decode_chunk(self._payload(message), self._numel, chunk, row)

            _average(rows_MV, out=mean[chunk.values])
            for i, row in enumerate(rows_MV):  # not all at once: BLAS is slow at so flat a product
                gram_MM[i, i:] += rows_MV[i:] @ row

        return mean, gram_MM.triu() + gram_MM.triu(diagonal=1).T

    def average_exact(self, messages: Tensor) -> Tensor:
        """Return the buffers' mean; what all hold, infinities included, stays what it is."""
        rows_ME = self.exact(messages)
        mean = _average(rows_ME, out=torch.empty_like(rows_ME[0]))
        return torch.where((rows_ME == rows_ME[0]).all(dim=0), rows_ME[0], mean)

    def _payload(self, message: Tensor) -> Tensor:
        return message[self._payload_at : self._payload_end]


def _average(rows_MN: Tensor, out: Tensor) -> Tensor:
    """Write the mean over the replicas into `out`; the sum runs in their order."""
    torch.add(rows_MN[0], 0.0, out=out)  # as a sum from zero: -0.0 becomes 0.0
    for row in rows_MN[1:]:
        out += row

    # by a tensor: a CUDA device would multiply by the rounded reciprocal of a Python number
    size = torch.full((), float(len(rows_MN)), dtype=torch.float32, device=out.device)
    return out.div_(size)


def summarize_headers(headers_M3: Tensor) -> HeaderSummary:
    """Put the headers of all replicas together; int64, shape (M, 3), in host memory."""
    flags, steps, digests = headers_M3.unbind(1)

    drifted, differ, late_differs = (
        bool((words != words[0]).any()) for words in (digests, steps, flags >> _LATE_FROM)
    )

    return HeaderSummary(_any_stops(flags), drifted, differ, late_differs, _nonfinite(flags))


def merge_summaries(headers_M3: Tensor) -> HeaderSummary:
    """Put together what replicas say of the headers that they have seen, in headers of their own.

    Their step stands for "drifted", their digest for "steps differ" and their late digest for "late
    differs". What is not finite is each one's own.
    """
    flags, drifted, differ = headers_M3.unbind(1)

    said = bool(drifted.any()), bool(differ.any()), bool((flags >> _LATE_FROM).any())

    return HeaderSummary(_any_stops(flags), *said, _nonfinite(flags))


def counted_messages(messages: Tensor, nonfinite: Sequence[int]) -> Tensor:
    """Return the messages that count: without those of `nonfinite`; all where there is no other."""
    counted = [m for m in range(len(messages)) if m not in nonfinite]
    if not 0 < len(counted) < len(messages):
        return messages
    # an index made of a list would be copied to the device while the host waits
    return torch.stack([messages[m] for m in counted])


def _any_stops(flags_M: Tensor) -> bool:
    return bool((flags_M & _STOP).any())


def _nonfinite(flags_M: Tensor) -> tuple[int, ...]:
    return tuple((flags_M & _NONFINITE).nonzero().flatten().tolist())


TAG = "outer_gradient"


class Arrival(NamedTuple):
    """What all replicas sent, put together; the same on all of them."""

    mean: Tensor  # (N + E,), fp32, over the K replicas that are finite
    stop: bool  # somebody wants to stop
    drifted: bool  # the digests differ
    steps_differ: bool  # the messages are of different inner steps
    late_differs: bool  # what no fragment holds, or what has joined
    nonfinite: tuple[int, ...]  # replicas whose values hold NaN or Inf
    gram: Tensor  # (K, K), fp32: inner products of the replicas' outer gradients, as decoded

    def shared_within(self, replica: Channel) -> Arrival:
        """Return what all ranks of a replica have learnt, each of them from its shard's peers.

        Collective over the replica. The mean stays the rank's own shard's.
        """
        flags = torch.tensor([self.stop, self.drifted, self.steps_differ, self.late_differs])
        mine = torch.cat([flags.float(), self.gram.flatten().cpu()]).to(replica.device)
        all_of_them = replica.all_gather(mine, REPLICA_TAG).wait().cpu()

        anywhere = all_of_them[:, : len(flags)].any(dim=0).tolist()
        stop, drifted, differ, late_differs = (bool(flag) for flag in anywhere)
        gram = all_of_them[:, len(flags) :].sum(dim=0).view_as(self.gram)

        # what is not finite is known of whole replicas already
        return Arrival(self.mean, stop, drifted, differ, late_differs, self.nonfinite, gram)

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


class FragmentExchange(Protocol):
    """A way for fragments of one size: N values in the wire format, E buffer values behind them.

    Attributes:
        staging: where values on a CUDA device are encoded; exchanges may share it.
    """

    staging: Staging

    @property
    def num_bytes(self) -> int:
        """Bytes that this replica sends for one fragment, by the ledger's formulas."""

    def launch(self, values: Tensor, header: Header, tag: str = TAG) -> Pending[Tensor]:
        """Send this replica's values, fp32 of shape (N + E,); what arrives can be kept and read.

        The ledger counts it under `tag`.
        """

    def read(self, arrived: Tensor, device: torch.device) -> Arrival:
        """Decode on `device` what arrived."""


def cheaper_fragment_exchange(
    channel: Channel, background: Background, wire: WireFormat, numel: int, exact: int = 0
) -> FragmentExchange:
    """Return the way that sends fewer bytes.

    Args:
        channel: to the other replicas.
        background: its thread sends what the training shall not wait for.
        wire: format of the values.
        numel: N, how many of them a fragment has.
        exact: E, how many values of buffers.
    """
    gather = GatheredFragmentExchange(channel, background, wire, numel, exact)
    shards = ShardedFragmentExchange(channel, background, wire, numel, exact)
    return shards if shards.num_bytes < gather.num_bytes else gather


def cheaper_fragment_exchanges(
    channel: Channel, background: Background, wire: WireFormat, sizes: Sequence[tuple[int, int]]
) -> list[FragmentExchange]:
    """Return the cheaper way for each of several fragments, which may be in flight together.

    `sizes` are N and E of each. Why a gather may have to go through the thread:

    1. Fragment 0 goes by shards: the thread launches the second message when the first has come.
    2. Fragment 1, which is gathered, is launched meanwhile: before that on one rank, after it on
       another. So the thread launches this one too, in its turn.
    """
    ways = [cheaper_fragment_exchange(channel, background, wire, *size) for size in sizes]
    thread_sends = any(isinstance(way, ShardedFragmentExchange) for way in ways)

    for way in ways:
        if isinstance(way, GatheredFragmentExchange):
            way.in_thread = thread_sends
        way.staging = ways[0].staging  # one stream: what one fragment gave back serves the next
    return ways


class GatheredFragmentExchange:
    """Every replica decodes every replica's values.

    Attributes:
        in_thread: whether the background's thread sends, as for the exchange by shards.
    """

    def __init__(
        self, channel: Channel, background: Background, wire: WireFormat, numel: int, exact: int = 0
    ) -> None:
        self._channel, self._background, self._numel = channel, background, numel
        self.staging, self._layout = Staging(), MessageLayout(wire, numel, exact)
        self.in_thread = False

    @property
    def num_bytes(self) -> int:
        """See `FragmentExchange`."""
        return all_gather_bytes(self._layout.num_bytes, self._channel.size)

    def launch(self, values: Tensor, header: Header, tag: str = TAG) -> Pending[Tensor]:
        """See `FragmentExchange`."""
        write = partial(self._write, values, header)
        if values.device != self._channel.device:
            message = self.staging.stage(write, header.on_device(values))
        elif self.in_thread:
            message = Pending.here(write()).wait
        else:
            return self._channel.all_gather(write(), tag)
        return self._background.submit(
            lambda: self._channel.all_gather(message(), tag).wait(), tag, message
        )

    def read(self, arrived: Tensor, device: torch.device) -> Arrival:
        """See `FragmentExchange`."""
        summary = summarize_headers(self._layout.headers(arrived))
        on_device = counted_messages(arrived, summary.nonfinite).to(device)

        mean, gram_KK = self._layout.average(on_device)
        mean = _joined(mean, self._layout.average_exact(on_device))
        return Arrival(mean, *summary, gram_KK)

    def _write(self, values: Tensor, header: Header) -> Tensor:
        return self._layout.write(values[: self._numel], values[self._numel :], header)


class ShardedFragmentExchange:
    """Every replica averages one shard for all; shards are whole blocks, the last ones padded."""

    def __init__(
        self, channel: Channel, background: Background, wire: WireFormat, numel: int, exact: int = 0
    ) -> None:
        self._channel, self._background = channel, background
        self._numel, self._exact = numel, exact
        self.staging = Staging()

        self._shard = -(-numel // (channel.size * BLOCK)) * BLOCK
        self._exact_shard = -(-exact // channel.size)
        self._up = MessageLayout(wire, self._shard, self._exact_shard)
        extra_floats = channel.size**2
        self._down = MessageLayout(wire, self._shard, self._exact_shard, extra_floats)

    @property
    def num_bytes(self) -> int:
        """See `FragmentExchange`."""
        size = self._channel.size
        up_bytes = all_to_all_bytes(size * self._up.num_bytes, size)
        return up_bytes + all_gather_bytes(self._down.num_bytes, size)

    def launch(self, values: Tensor, header: Header, tag: str = TAG) -> Pending[Tensor]:
        """See `FragmentExchange`."""

        def write() -> Tensor:
            values_MS = self._shards(values[: self._numel], self._shard)
            exact_ME = self._shards(values[self._numel :], self._exact_shard)
            shards = zip(values_MS, exact_ME, strict=True)
            return torch.stack([self._up.write(*shard, header) for shard in shards])

        if values.device == self._channel.device:
            return self._background.submit(self._carry(Pending.here(write()).wait, tag), tag)
        staged = self.staging.stage(write, header.on_device(values))
        return self._background.submit(self._carry(staged, tag), tag, staged)

    def read(self, arrived: Tensor, device: torch.device) -> Arrival:
        """See `FragmentExchange`."""
        summary = merge_summaries(self._down.headers(arrived))
        on_device = arrived.to(device)
        values = self._down.values(on_device).view(-1)[: self._numel]
        mean = _joined(values, self._down.exact(on_device).flatten()[: self._exact])
        size = self._channel.size - len(summary.nonfinite) or self._channel.size
        gram_KK = self._down.extra(on_device).sum(0)[: size**2].view(size, size)
        return Arrival(mean, *summary, gram_KK)

    def _shards(self, values: Tensor, numel: int) -> Tensor:
        """Return `values` filled up with zeros, a row of `numel` for each replica."""
        size = self._channel.size
        return pad(values, (0, size * numel - len(values))).view(size, numel)

    def _carry(self, messages: Callable[[], Tensor], tag: str) -> Callable[[], Tensor]:
        def carry() -> Tensor:
            received = self._channel.all_to_all(messages(), tag).wait()
            summary = summarize_headers(self._up.headers(received))

            counted = counted_messages(received, summary.nonfinite)
            mean, gram_KK = self._up.average(counted)

            own = self._channel.rank in summary.nonfinite
            differ, late = int(summary.steps_differ), int(summary.late_differs)
            seen = Header(summary.stop, int(summary.drifted), differ, own, late)

            exact = self._up.average_exact(counted)
            extra = pad(gram_KK.flatten(), (0, self._channel.size**2 - gram_KK.numel()))
            message = self._down.write(mean, exact, seen, extra=extra)
            return self._channel.all_gather(message, tag).wait()

        return carry


def _joined(values: Tensor, exact: Tensor) -> Tensor:
    return torch.cat([values, exact]) if len(exact) else values
