"""Who takes part in an exchange.

A *view* is one composition of the group: its members and the channel between them. Every exchange
runs in one view from its first byte to its last. Algorithms read the group's size and their own
place from a view and from nowhere else, so that an exchange can be run again in another view when a
member is lost. A job of fixed size has one view for its whole life.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lightning_commfree.comm.channel import Channel


class View(NamedTuple):
    """One composition of the group."""

    number: int  # counts the views of a job, from 0
    members: tuple[int, ...]  # ids of replicas or workers, in the channel's order
    channel: Channel  # between the members; this process is one of them

    @classmethod
    def of(cls, channel: Channel) -> View:
        """Return the view whose members are the ranks of `channel`, numbered from 0."""
        return cls(0, tuple(range(channel.size)), channel)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def place(self) -> int:
        """Index of this process's member in `members`."""
        return self.channel.rank


class Membership(Protocol):
    """Decides which view an exchange runs in.

    Attributes:
        changes: whether members may come and go. Exchanges then keep what they need to run again.
    """

    changes: bool

    def view(self) -> View:
        """Return the current view."""

    def after_failure(self, view: View, error: RuntimeError) -> View:
        """Return the view that continues after an exchange in `view` failed.

        Raises:
            RuntimeError: the job cannot continue.
        """

    def leave(self) -> None:
        """Leave the group; the other members continue without this one."""


class FixedMembership:
    """The same members from start to end: a lost member ends the job."""

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
        """Do nothing: the job owns the channel and closes it."""
