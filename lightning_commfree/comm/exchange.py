"""One exchange between the members of a view: the same reduced values on all of them.

The values are cut into S shards. A member's message about one shard has u bytes, a reduced shard d
bytes. There are two routes for M members:

=========  ===========================================================  ===  =====================
route      what travels                                                 S    bytes a member sends
=========  ===========================================================  ===  =====================
gather     every message to every member; each member reduces them all  1    u (M - 1)
two-phase  shard i of every message to member i, its *owner*, which     M    (u + d) (M - 1)
           reduces it and sends the result to all
=========  ===========================================================  ===  =====================

Gathering is cheaper for two members and for small messages, two phases from three members on. Code
that goes `up`, reduces and goes `down` works on both routes: down a gather nothing travels, because
every member has reduced the only shard itself.

What a message holds and how it is reduced is up to the algorithm: Streaming DiLoCo averages values
that a codec has rounded, Distributed Lion counts votes. `MessageLayout` places the sections of a
message.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.ledger import all_gather_bytes, all_to_all_bytes
from lightning_commfree.comm.view import View


class Route(NamedTuple):
    """How messages travel between the members of a view, and which shard each of them reduces."""

    view: View
    two_phase: bool

    @property
    def num_shards(self) -> int:
        """S: into how many shards the values are cut."""
        return self.view.size if self.two_phase else 1

    @property
    def shard(self) -> int:
        """Index of the shard that this member reduces."""
        return self.view.place if self.two_phase else 0

    def up(self, messages: Tensor, tag: str) -> Pending[Tensor]:
        """Send this member's message about each shard, shape (S, u).

        Returns:
            All members' messages about this member's shard, shape (M, u), in their order.
        """
        channel = self.view.channel
        if self.two_phase:
            return channel.all_to_all(messages, tag)
        return channel.all_gather(messages[0], tag)

    def down(self, reduced: Tensor, tag: str) -> Pending[Tensor]:
        """Send the reduced shard of this member, shape (d,); return all of them, shape (S, d)."""
        if self.two_phase:
            return self.view.channel.all_gather(reduced, tag)
        return Pending.here(reduced.unsqueeze(0))

    def bytes_up(self, num_bytes: int) -> int:
        """Return the bytes that this member sends up, for messages of `num_bytes` a shard."""
        size = self.view.size
        if self.two_phase:
            return all_to_all_bytes(size * num_bytes, size)
        return all_gather_bytes(num_bytes, size)

    def bytes_down(self, num_bytes: int) -> int:
        """Return the bytes that this member sends down, for a reduced shard of `num_bytes`."""
        return all_gather_bytes(num_bytes, self.view.size) if self.two_phase else 0


def routes(view: View) -> tuple[Route, Route]:
    """Return both routes, the gather first: it is taken where both send as many bytes."""
    return Route(view, two_phase=False), Route(view, two_phase=True)


class MessageLayout:
    """Where the sections of a message are: one behind the other, each on an 8-byte boundary.

    The size is fixed, so that messages of all members can travel in one collective, and every
    section can be viewed in a wider dtype.

    Args:
        **sizes: bytes of each section, by name, in order.

    Attributes:
        num_bytes: of the whole message, a multiple of 8.
    """

    def __init__(self, **sizes: int) -> None:
        self._sections: dict[str, slice] = {}
        self.num_bytes = 0
        for name, size in sizes.items():
            self._sections[name] = slice(self.num_bytes, self.num_bytes + size)
            self.num_bytes = -(-(self.num_bytes + size) // 8) * 8

    def clear_gaps(self, message: Tensor) -> None:
        """Zero the bytes between the sections: equal contents then make equal bytes."""
        stops = [section.stop for section in self._sections.values()]
        starts = [section.start for section in self._sections.values()]
        for stop, start in zip(stops, [*starts[1:], self.num_bytes], strict=True):
            message[stop:start].zero_()

    def section(self, message: Tensor, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return one section of one message, shape (num_bytes,), as a view of `dtype`."""
        return message[self._sections[name]].view(dtype)

    def sections(self, messages: Tensor, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return one section of several messages, shape (M, num_bytes), as rows of `dtype`."""
        return torch.stack([self.section(message, name, dtype) for message in messages])
