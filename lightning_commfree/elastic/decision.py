"""What a replica does next about one exchange of a fragment: the only decision of an elastic job.

Exchanges are numbered in launch order; the code calls a numbered exchange a *flight*. Each replica
creates one message per flight in the store, and one of them creates the flight's *commit*: the list
of the messages that all replicas average, in order. Any replica may create it; the store keeps the
first one. So nobody is ever declared dead: whom a replica waits for, and for how long, is its own
guess, and a wrong guess costs a wait or leaves a message for later, but never makes replicas
differ.

If the commit has many members, some of them own parts of all messages (`elastic.parts`). An owner
creates the mean of its parts, and everybody reads these means instead of the messages. A replica
that has waited for a mean for the grace creates it itself: whoever does so creates the same.

`decide` is a pure function, so `tests/elastic/test_decision.py` can run every interleaving of
several replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Heard:
    """What a replica knows about a flight."""

    launched: bool  # it has launched the flight itself; until then, it only listens
    # By replica, the messages that are in the store and whether they count: a replica with NaN
    # abstains. Its own message is among them only after the store has confirmed it: a commit must
    # not list a message that others cannot read.
    messages: Mapping[str, bool]
    commit: tuple[str, ...] | None  # the replicas whose messages are averaged
    # Seconds for which training has waited to land it, or for what is to be read since there is a
    # commit; None: it is not due.
    late_s: float | None
    name: str = ""  # this replica's
    owners: tuple[str, ...] = ()  # those in the commit that own parts; empty: all read all messages
    read: frozenset[str] = frozenset()  # whose means or, without owners, messages it has read


class Group(NamedTuple):
    """What a replica knows about the others."""

    expected: frozenset[str]  # to wait for: those in the latest commit, or heard from since
    possible: frozenset[str]  # those that may send a message at all


class Rules(NamedTuple):
    """Settings of `decide`: how long to wait for messages, and for how many."""

    grace_s: float  # how long training waits for expected messages
    patience_s: float  # how long if no message counts: landing such a commit ends all replicas
    min_replicas: int  # the least number of messages, counted or not, for a commit


class Look(NamedTuple):
    """Look for the commit and, if it does not exist, for the messages of `names`."""

    names: tuple[str, ...]


class Commit(NamedTuple):
    """Create the commit with the messages of `names`; look for the commit if it exists."""

    names: tuple[str, ...]


class Read(NamedTuple):
    """Read what `names` have created: their means or, without owners, their messages."""

    names: tuple[str, ...]


class Reduce(NamedTuple):
    """Create the means of the parts that `owners` own, unless they exist."""

    owners: tuple[str, ...]


class Land(NamedTuple):
    """The flight may land: all that its commit needs has been read."""


Action = Look | Commit | Read | Reduce | Land


def decide(heard: Heard, group: Group, rules: Rules) -> Action:
    """Return what to do next about a flight.

    A commit lists nobody if all messages abstain; landing it is an error on all replicas.
    """
    if heard.commit is not None:
        missing = tuple(n for n in heard.owners or heard.commit if n not in heard.read)
        if heard.owners and heard.name in missing:
            return Reduce((heard.name,))
        if heard.owners and missing and heard.late_s is not None and heard.late_s >= rules.grace_s:
            return Reduce(missing)  # their owners may be dead
        return Read(missing) if missing else Land()

    awaited = group.possible - heard.messages.keys()
    if not heard.launched or len(heard.messages) < max(rules.min_replicas, 1):
        return Look(tuple(sorted(awaited)))
    if not any(heard.messages.values()):
        complete = heard.late_s is not None and (not awaited or heard.late_s >= rules.patience_s)
    elif heard.late_s is None:
        complete = not awaited  # nobody needs the result yet, so a newcomer may still be in time
    else:
        complete = group.expected <= heard.messages.keys() or heard.late_s >= rules.grace_s
    if complete:
        return Commit(tuple(sorted(name for name, counts in heard.messages.items() if counts)))
    return Look(tuple(sorted(awaited)))
