"""Membership of an elastic job, in which replicas join, leave and die.

A *flight* is one exchange of the job. Flights are numbered from 0 in the order in which they are
launched, which is the same on all members. Before each flight, the members ask the *rendezvous* for
a *quorum*: it answers all of them together, as soon as every member that is alive has asked, with
the `Member` record of each. All decisions are functions of that answer, so that all members take
the same ones without further messages:

- *Founding.* If nobody is a member yet, all who asked are founders, from flight 0 on.
- *The next view.* The view of a flight consists of the members that have completed all earlier
  flights, and of joiners that have caught up. A joiner that is behind is not waited for.
- *After a failure.* A member that dies breaks the exchange, possibly on some members only. If some
  have completed the flight, the others fetch its messages from one of them; otherwise all repeat it
  in the view without the dead member.
- *No split views.* A restarted rendezvous has forgotten the members and may answer any subset of
  them. So a view must contain more than half of the members of the last one. Fewer are enough if
  the rendezvous has not restarted, because it then knows that all others are dead.

Asking happens on a background thread: only a landing waits for it. Two things are replaceable: the
rendezvous (`Rendezvous`), and how a joiner gets what it needs (`StateTransfer`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

NEW = "new"  # wants to found the job, or to join it
JOINING = "joining"  # fetches state, and is not part of a view yet
MEMBER = "member"
ENDING = "ending"  # a member that has begun the last exchanges of its fit: nobody may join
LEAVING = "leaving"  # takes part in no further flight


class Member(NamedTuple):
    """A replica's record, which it sends to the others whenever it asks for a quorum.

    All fields are JSON values.
    """

    replica: str  # unique name of this process, not reused after a restart
    status: str = NEW
    flights: int = 0  # number of flights that it has completed
    slot: int = -1  # its share of the data, and its place in a view; -1 before it is a member
    view: str = ""  # name of the last view in which it was; "" if none
    view_size: int = 0  # number of members of that view
    number: int = 0  # of the quorum that formed that view
    broken: bool = False  # an exchange in that view has failed, so that its channel is unusable
    asked: int = 0  # number of times that this process has asked; makes each quorum unique
    settings: str = ""  # hash of settings and model, which must be the same on all replicas
    step: int = 0  # inner steps in the common schedule
    store: str = ""  # "host:port" of its TCPStore, where the channels of a view meet
    states: tuple[str, ...] = ()  # addresses of its ranks' state servers, in rank order


class Quorum(NamedTuple):
    """Answer of the rendezvous, the same for all replicas that it contains."""

    number: int  # from 1; increases if other replicas are in it, and restarts with the rendezvous
    members: tuple[Member, ...]  # those that asked, in order of `replica`


class Rendezvous(Protocol):
    """Service that knows which replicas are alive."""

    def quorum(self, mine: Member) -> Quorum:
        """Ask for a quorum, as `mine.replica`; block until it is complete.

        The answer comes when all replicas of the previous quorum have asked that still send
        heartbeats. A replica sends them from its first call to `close`, also while it waits here.
        If a thread asks while another one waits, the later record replaces the earlier one, and
        both get the same answer. While the service is unreachable, the call keeps trying.

        Raises:
            RuntimeError: there is no such service at the address, or it stayed unreachable or gave
                no answer for longer than the job's timeout; the message says which.
        """

    def close(self) -> None:
        """Stop the heartbeat, and interrupt a `quorum` in another thread with a `RuntimeError`."""


class StateTransfer(Protocol):
    """Serves one rank's state to joiners, and fetches the state of others.

    A snapshot is a (nested) dict, and a message is a dict; both contain only tensors and plain
    values, so that `torch.load(weights_only=True)` can read them.
    """

    address: str  # of this rank's server, for `Member.states`

    def serve(
        self,
        snapshot: Callable[[], dict[str, Any]],
        messages: Callable[[int], list[dict[str, Any]]],
    ) -> None:
        """Begin to serve.

        Args:
            snapshot: returns a copy of the state; called on a thread of the server, once per joiner
                that begins a download.
            messages: returns the messages of all completed flights from a given one on; raises
                `LookupError` if some of them are no longer kept.
        """

    def fetch_snapshot(self, address: str) -> dict[str, Any]:
        """Fetch a snapshot; a download that breaks off is resumed.

        Raises:
            ConnectionError: the server is gone, or refuses the token.
        """

    def fetch_messages(self, address: str, first: int) -> list[dict[str, Any]]:
        """Fetch the messages of all completed flights from `first` on; may be empty.

        Raises:
            LookupError: they are no longer kept: a new snapshot is needed.
            ConnectionError: as above.
        """

    def close(self) -> None:
        """Stop serving."""
