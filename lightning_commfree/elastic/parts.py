"""Split messages into parts, so that each member of an exchange reduces some of them for all.

A member that reads the messages of all others reads a lot if there are many. So there are two
routes through a store, as in `comm.exchange`, for M members and messages of u bytes, whose mean has
d bytes:

=========  ========================================================  ==============================
route      what a member creates and reads                           bytes, about
=========  ========================================================  ==============================
gather     its message; those of the others                          u + (M - 1) u
two-phase  its message; its parts of the others' messages; the       u + (M - 1) u / M + d
           mean of its parts; the means of the other parts
=========  ========================================================  ==============================

A message is created before anybody knows who the members are, so the number of its parts does not
depend on them. The first members of a commit *own* the parts, in equal shares. Which route a flight
takes is a function of the number of its members, so all of them take the same one.

What an owner creates is a function of the commit and the messages. If it dies, any other member
can create the same. The mean is rounded a second time, and only the owner would know the error, so
a codec with error feedback never takes the two-phase route.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.exchange import Route, View
from lightning_commfree.diloco.codec import Codec, num_blocks
from lightning_commfree.diloco.exchange import TAG, Arrived, FragmentExchange, Header

_MOST_PARTS = 32
_LEAST_BLOCKS = 16  # in a part: headers and seals are at most 6 % of a message in fp4
# Before each part: bytes of the whole object, bytes of the part, and a digest of the part. So a
# range of parts can be checked without the rest of the object.
_SEAL = struct.Struct("<qq24s")
SEAL_BYTES, SIZE_BYTES = _SEAL.size, 8  # the size of an object is at its beginning


def sealed(parts: Sequence[bytes]) -> bytes:
    """Join parts to an object for the store."""
    size = sum(SEAL_BYTES + len(part) for part in parts)
    seals = (_SEAL.pack(size, len(part), _digest(part)) for part in parts)
    return b"".join(piece for pair in zip(seals, parts, strict=True) for piece in pair)


def opened(data: bytes) -> list[memoryview]:
    """Return the parts in an object or in a range of its parts.

    Raises:
        ValueError: the data are damaged.
    """
    parts, start = [], 0
    while start < len(data):
        if len(data) - start < SEAL_BYTES:
            raise ValueError("a part is incomplete")
        _, length, digest = _SEAL.unpack_from(data, start)
        part = memoryview(data)[start + SEAL_BYTES :][:length]
        if _digest(part) != digest:
            raise ValueError("a part differs from its digest")
        parts.append(part)
        start += SEAL_BYTES + length
    return parts


def opened_from(address: str, key: str, data: bytes) -> list[memoryview]:
    """Return the parts in an object of the store at `address`, as `opened`.

    Raises:
        ValueError: the data are damaged; for the user.
    """
    try:
        return opened(data)
    except ValueError as error:
        raise ValueError(
            f"The object {key} in {address} is damaged: {error}. This replica ends. If the others"
            " end with the same error, the store has lost data: start another job, in another"
            " store, from the newest checkpoint. If they do not, start this replica again."
        ) from None


def size_of(data: bytes) -> int:
    """Return the size of an object that begins with `data`."""
    return int.from_bytes(data[:SIZE_BYTES], "little")


def num_parts(numel: int, codec: Codec) -> int:
    """Return into how many parts messages about `numel` values are split; 1 with error feedback."""
    if codec.error_feedback:
        return 1
    blocks = num_blocks(numel)
    most = min(_MOST_PARTS, max(blocks // _LEAST_BLOCKS, 1))
    return -(-blocks // -(-blocks // most))  # no part is empty


class StoreExchange(FragmentExchange):
    """Exchange of a fragment through a store."""

    @property
    def message_bytes(self) -> int:
        """Size of a member's message."""
        return self.route.num_shards * self._part_bytes

    @property
    @override
    def num_bytes(self) -> int:
        return self.message_bytes + self._reduced_bytes(self.route.view.rank)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the busiest member creates and reads."""
        size = self.route.view.size
        if not self.route.two_phase:
            return size * self.message_bytes
        owned = max(len(self._owned(owner)) for owner in range(self.owners))
        reduced = sum(self._reduced_bytes(owner) for owner in range(self.owners))
        return self.message_bytes + (size - 1) * owned * self._part_bytes + reduced

    @property
    def owners(self) -> int:
        """Number of members that own parts."""
        return min(self.route.num_shards, self.route.view.size)

    def span(self, owner: int) -> tuple[int, int]:
        """Return where an owner's parts are in a message: first byte and number of bytes."""
        owned = self._owned(owner)
        return owned.start * self._part_bytes, len(owned) * self._part_bytes

    def reduce(self, owner: int, messages: Sequence[Sequence[memoryview]]) -> bytes:
        """Average an owner's parts of all members' messages; return the object to create.

        The first owner's object begins with the headers of all messages: each part has them, but
        not every member reads a part of each message.
        """
        means: list[bytes] = []
        for part, received in zip(self._owned(owner), zip(*messages, strict=True), strict=True):
            arrived = self.arrived(_rows(received))
            if not owner and not means:
                means.append(arrived.headers.numpy().tobytes())
            means.append(self._reduce(arrived, part, keep_error=False)[0].numpy().tobytes())
        data = sealed(means)
        self.route.view.channel.ledger.count_sent(TAG, len(data))
        return data

    def received(self, objects: Sequence[Sequence[memoryview]]) -> Arrived:
        """Return the objects that the members have created as an `Arrived`, for `decode`.

        They are the members' messages or, on the two-phase route, what `reduce` has returned.
        """
        if not self.route.two_phase:
            return self.arrived(_rows([b"".join(parts) for parts in objects]))
        headers, *means = (part for parts in objects for part in parts)
        rows = _rows([headers]).view(torch.int64).view(self.route.view.size, -1)
        return Arrived(rows, _rows(means))

    @property
    def _part_bytes(self) -> int:
        return SEAL_BYTES + self._up.num_bytes

    def _owned(self, owner: int) -> range:
        """Return the consecutive parts that an owner reduces; a request per message reads them."""
        first, after = (self.route.num_shards * i // self.owners for i in (owner, owner + 1))
        return range(first, after)

    def _reduced_bytes(self, member: int) -> int:
        """Return the number of bytes that a member creates after `reduce`."""
        if not self.route.two_phase or not 0 <= member < self.owners:
            return 0
        headers = SEAL_BYTES + 8 * len(Header._fields) * self.route.view.size
        parts = len(self._owned(member)) * (SEAL_BYTES + self._down.num_bytes)
        return parts + (0 if member else headers)


def routes(view: View, parts: int) -> tuple[Route, Route]:
    """Return the gather route and the two-phase route through a store."""
    return Route(view, two_phase=False, split=parts), Route(view, two_phase=True, split=parts)


def _digest(part: bytes | memoryview) -> bytes:
    return hashlib.sha256(part).digest()[:24]


def _rows(parts: Sequence[bytes | memoryview]) -> Tensor:
    return torch.stack([torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts])
