"""One message of an exchange: what stands where in its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.diloco.wire import WireFormat, chunks, decode

_HEADER_BYTES = 3 * 8
_STOP, _NONFINITE = 1, 2  # bits of the first word
_LATE_FROM = 8
_NOTICE_FROM = 31  # bits of the second word: above the step, the code of a notice, plus one


class EndNotice(NamedTuple):
    """What a replica says when its training has ended."""

    step: int  # after which
    goes_on: bool  # it would have, without others that end

    @property
    def code(self) -> int:
        """As one number, 0 or more."""
        return 2 * self.step + self.goes_on

    @staticmethod
    def decode(code: int) -> EndNotice:
        """Take apart what `code` put together."""
        return EndNotice(code // 2, bool(code % 2))


class Header(NamedTuple):
    """What travels ahead of a replica's values; tensors in it are not waited for."""

    stop: bool
    step: int
    digest: Tensor | int  # int64
    nonfinite: Tensor | bool = False  # the values hold NaN or Inf
    late_digest: Tensor | int = 0  # of what no fragment holds, and of what has joined; 40 bits
    ended: EndNotice | None = None  # this replica's training has

    @property
    def words(self) -> tuple[Tensor | int, ...]:
        """As it travels: flags and late digest, step and notice, digest."""
        flags = self.stop * _STOP + self.nonfinite * _NONFINITE
        notice = 0 if self.ended is None else self.ended.code + 1
        first = flags + (self.late_digest << _LATE_FROM)
        return first, self.step + (notice << _NOTICE_FROM), self.digest

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
    ended: tuple[int, ...]  # by replica, the code of its notice; -1: it trains on


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
    steps, ended = _steps_and_notices(steps)

    drifted, differ, late_differs = (
        bool((words != words[0]).any()) for words in (digests, steps, flags >> _LATE_FROM)
    )

    return HeaderSummary(_any_stops(flags), drifted, differ, late_differs, _nonfinite(flags), ended)


def merge_summaries(headers_M3: Tensor) -> HeaderSummary:
    """Put together what replicas say of the headers that they have seen, in headers of their own.

    Their step stands for "drifted", their digest for "steps differ" and their late digest for "late
    differs". What is not finite and the notice are each one's own.
    """
    flags, drifted, differ = headers_M3.unbind(1)
    drifted, ended = _steps_and_notices(drifted)

    said = bool(drifted.any()), bool(differ.any()), bool((flags >> _LATE_FROM).any())

    return HeaderSummary(_any_stops(flags), *said, _nonfinite(flags), ended)


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


def _steps_and_notices(words_M: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Take the second words of headers apart: the steps, and the codes of the notices."""
    codes = (words_M >> _NOTICE_FROM) - 1
    return words_M & ((1 << _NOTICE_FROM) - 1), tuple(codes.tolist())
