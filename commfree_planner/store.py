"""Bytes of an exchange of elastic replicas, which send fragments through a store.

A replica stores its message first, and reads those of the others when they are all there. So the
bytes in both directions add up on its link, and on the link of a store that is one machine.

The formulas are those of `lightning_commfree.elastic.parts`; `tests/planner/test_library.py`
compares them. In bytes, with u bytes per message, and without headers:

=========  ===================  ==========================  ====================
route      a replica sends      a replica sends and reads   all replicas together
=========  ===================  ==========================  ====================
gather     u                    M u                         M^2 u
two-phase  (1 + 1/M) u          (3 - 1/M) u                 (3 M - 1) u
=========  ===================  ==========================  ====================

One member also stores the outer state at most every four cycles, for those that join.
"""

from __future__ import annotations

from typing import NamedTuple

from commfree_planner.bytes_sent import BLOCK, payload_bytes

STATE_BYTES = 8  # per parameter: the global copy and the momentum, in fp32
STATE_CYCLES = 4  # after so many, one member stores the outer state

_MOST_PARTS = 32  # of a message
_LEAST_BLOCKS = 16  # in a part
_SEAL = 40  # before each part
_HEADER = 72  # in each part of a message, and of each member in the first mean


class StoreExchange(NamedTuple):
    """The bytes of one exchange through a store, including headers.

    Attributes:
        two_phase: whether members average parts of all messages for each other.
        sent: by a member, on average.
        moved: sent and read by the member that moves most.
        total: sent and read by all members.
    """

    two_phase: bool
    sent: float
    moved: int
    total: int


def store_exchange(numel: int, members: int, wire_dtype: str) -> StoreExchange:
    """Return the exchange of `numel` values on the route on which a member moves fewer bytes."""
    parts = _num_parts(numel, wire_dtype)
    width = -(-numel // (parts * BLOCK)) * BLOCK if parts > 1 else numel  # values in a part
    payload = _padded(payload_bytes(width, wire_dtype))
    part = _SEAL + _HEADER + payload
    message = parts * part
    gathered = StoreExchange(False, message, members * message, members**2 * message)

    norms = _padded(4 * (members + 1))
    means = parts * (_SEAL + norms + payload) + _SEAL + members * _HEADER
    most = -(-parts // min(parts, members))  # parts of each message, averaged by one member
    reduced = StoreExchange(
        True,
        message + means / members,
        message + (members - 1) * most * part + means,
        (2 * members - 1) * message + members * means,
    )
    return reduced if reduced.moved < gathered.moved else gathered


def _num_parts(numel: int, wire_dtype: str) -> int:
    """Return into how many parts a message is split."""
    if wire_dtype == "int2":  # only the member that rounds a mean would know the error
        return 1
    blocks = -(-numel // BLOCK)
    most = min(_MOST_PARTS, max(blocks // _LEAST_BLOCKS, 1))
    return -(-blocks // -(-blocks // most))


def _padded(num_bytes: int) -> int:
    """Round up to whole words of 8 bytes."""
    return -(-num_bytes // 8) * 8
