"""Reduce values over the members of a group, with bit-identical results on all members.

The values are split into S shards. A member's message about one shard has u bytes, and a reduced
shard has d bytes. There are two routes for M members:

=========  ===========================================================  ===  =====================
route      messages                                                     S    bytes a member sends
=========  ===========================================================  ===  =====================
gather     every message to every member; each member reduces them all  1    u (M - 1)
two-phase  shard i of every message to member i, its *owner*, which     M    (u + d) (M - 1)
           reduces it and sends the result to all members
=========  ===========================================================  ===  =====================

Gathering is cheaper with two members or for small messages; otherwise, the two-phase route is
cheaper. Both routes use the same code: messages are sent to the owners of the shards (`up`) and
reduced, and the results are sent to all members (`down`). On the gather route, every member reduces
everything, so `down` sends nothing.

Each algorithm defines its messages and how to reduce them: Streaming DiLoCo averages values that a
codec has rounded; Distributed Lion counts votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import all_gather_bytes, all_to_all_bytes


class View(NamedTuple):
    """One version of a group's membership: its members and the channel between them.

    An exchange uses a single view from start to end. Algorithms get the group's size and their
    own rank only from the view, so that an exchange can be repeated in another view when a member
    is lost. A job with a fixed number of ranks has a single view.
    """

    number: int  # number of this view in the job, from 0
    members: tuple[int, ...]  # ids of replicas or workers, in the channel's order
    channel: Channel  # channel between the members, including this process

    @classmethod
    def of(cls, channel: Channel) -> View:
        """Return the only view of a group that never changes: all ranks of `channel`."""
        return cls(0, tuple(range(channel.size)), channel)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """Index of this process in `members`."""
        return self.channel.rank


class Route(NamedTuple):
    """Communication pattern for a reduction: gather or two-phase (see the module docstring)."""

    view: View
    two_phase: bool
    split: int = 0  # S, if values are split before the members are known (`elastic.parts`)

    @property
    def num_shards(self) -> int:
        """Number of shards into which the values are split (S)."""
        return self.split or (self.view.size if self.two_phase else 1)

    @property
    def together(self) -> bool:
        """Whether an exchange ends at the same time for all members, however late each launches.

        Through a store it does not.
        """
        return not self.split

    @property
    def shard(self) -> int:
        """Index of the shard that this member reduces."""
        return self.view.rank if self.two_phase else 0

    def up(self, messages: Tensor, tag: str) -> Pending[Tensor]:
        """Start to send messages, (S, u), to the shards' owners; pending: the received, (M, u).

        `messages` has shape (S, u): this member's message about each shard. On the gather route,
        there is only one message, which is sent to all members. The pending result has shape (M,
        u): all members' messages, in member order, about the shard that this member reduces.
        """
        channel = self.view.channel
        if self.two_phase:
            return channel.all_to_all(messages, tag)
        return channel.all_gather(messages[0], tag)

    def down(self, reduced: Tensor, tag: str) -> Pending[Tensor]:
        """Start to share a reduced shard, (d,), with all members; pending: all shards, (S, d).

        On the gather route, nothing is sent: every member has reduced the only shard itself.
        """
        if self.two_phase:
            return self.view.channel.all_gather(reduced, tag)
        return Pending.here(reduced.unsqueeze(0))

    def bytes_up(self, num_bytes: int) -> int:
        """Return how many bytes this member sends in `up`, for messages of `num_bytes` each."""
        size = self.view.size
        if self.two_phase:
            return all_to_all_bytes(size * num_bytes, size)
        return all_gather_bytes(num_bytes, size)

    def bytes_down(self, num_bytes: int) -> int:
        """Return how many bytes this member sends in `down`, for a reduced shard of `num_bytes`."""
        return all_gather_bytes(num_bytes, self.view.size) if self.two_phase else 0


def routes(view: View) -> tuple[Route, Route]:
    """Return the gather route and the two-phase route.

    The gather route is first, because callers choose the cheaper route with `min`, which returns
    the first one on a tie.
    """
    return Route(view, two_phase=False), Route(view, two_phase=True)


def ordered_sum(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum tensors in the given order, so that the sum is bit-identical on all members."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


class MessageLayout:
    """Byte layout of a message with named sections, each starting at a multiple of 8 bytes.

    This alignment allows a section to be viewed as any dtype. `sizes` maps the name of each section
    to its size in bytes, in the order of the sections. Sizes are fixed, because a collective needs
    messages of equal size. The attribute `num_bytes` is the size of the message, a multiple of 8.
    """

    def __init__(self, **sizes: int) -> None:
        self._sections: dict[str, slice] = {}
        self.num_bytes = 0
        for name, size in sizes.items():
            self._sections[name] = slice(self.num_bytes, self.num_bytes + size)
            self.num_bytes = -(-(self.num_bytes + size) // 8) * 8  # rounded up to 8

    def clear_gaps(self, message: Tensor) -> None:
        """Zero the padding between sections, so that equal contents give identical bytes."""
        stops = [section.stop for section in self._sections.values()]
        starts = [section.start for section in self._sections.values()]
        for stop, start in zip(stops, [*starts[1:], self.num_bytes], strict=True):
            message[stop:start].zero_()

    def section(self, message: Tensor, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return a section of a message as a flat view of `dtype`."""
        return message[self._sections[name]].view(dtype)

    def sections(self, messages: Tensor, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Copy the same section of several messages into rows of `dtype`, one row per message."""
        return torch.stack([self.section(message, name, dtype) for message in messages])
