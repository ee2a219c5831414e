"""Membership of a group: the members that take part in an exchange, and the channel between them.

An exchange runs in one *view* from start to end. Algorithms take the group's size and their own
rank from the view only, so that an exchange can be repeated in another view when a member is lost.
A job of fixed size has a single view.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lightning_commfree.comm.channel import Channel


class View(NamedTuple):
    """One version of a group's membership."""

    number: int  # of this view in the job, from 0
    members: tuple[int, ...]  # ids of replicas or workers, in the channel's order
    channel: Channel  # between the members; this process is one of them

    @classmethod
    def of(cls, channel: Channel) -> View:
        """Return the view in which each rank of `channel` is a member."""
        return cls(0, tuple(range(channel.size)), channel)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """Index of this process's member in `members`."""
        return self.channel.rank


class Membership(Protocol):
    """Source of the view that each exchange runs in.

    Attributes:
        changes: whether members may come and go. Exchanges then keep their inputs for a retry.
    """

    changes: bool

    def view(self) -> View:
        """Return the current view."""

    def after_failure(self, view: View, error: RuntimeError) -> View:
        """Return the view to continue in after an exchange in `view` failed.

        Raises:
            RuntimeError: the job cannot continue.
        """

    def leave(self) -> None:
        """Leave the group; the other members continue without this one."""


class FixedMembership:
    """Membership that never changes: losing a member ends the job."""

    changes = False

    def __init__(self, channel: Channel) -> None:
        self._view = View.of(channel)

    def view(self) -> View:
        """Return the only view."""
        return self._view

    def after_failure(self, view: View, error: RuntimeError) -> View:
        """Raise `error`, which names the lost ranks."""
        del view
        raise error

    def leave(self) -> None:
        """Do nothing: the job owns and closes the channel."""
