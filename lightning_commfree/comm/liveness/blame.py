"""Whom an exchange failed for, from what the ranks have told; and the sentence about it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from lightning_commfree.comm.liveness.questions import Answers

REASON_CHARACTERS = 250
ADVICE = "Restart all ranks from the last checkpoint."
AGREED = "All ranks stop"  # in errors of all ranks alike; that one is gone by then says nothing
_NAMED = 50  # lost ranks in a message, which has to fit into a line


class Findings:
    """What a rank has found out about the others; the thread that answers writes to it too.

    Attributes:
        left: by rank that closed its channel: what it said.
        lost: by rank: why; the first finding, its own or a peer's, which is never replaced.
    """

    def __init__(self) -> None:
        self.left: dict[int, dict[str, Any]] = {}
        self.lost: dict[int, str] = {}
        self._lock = threading.Lock()

    def learn(self, lost: Mapping[int, str]) -> None:
        """Keep who is lost, if nobody has been before."""
        with self._lock:
            if not self.lost:
                self.lost = {r: lost[r][:REASON_CHARACTERS] for r in sorted(lost)[:_NAMED]}

    def hear(self, message: Mapping[str, Any], rank: int, peers: Collection[int]) -> None:
        """Learn what a peer tells; `rank` is this one. What is no such message is left alone."""
        match message:
            case {"lost": dict(told)}:
                known = {str(one): one for one in (rank, *peers)}
                self.learn({known[r]: str(reason) for r, reason in told.items() if r in known})
            case {"left": {"rank": int(peer), "launched": int()} as words} if peer in peers:
                self.left[peer] = dict(words)

    def left_at(self, rank: int) -> int:
        """Return what a rank had launched that has closed its channel; -1 if it has not."""
        return int(self.left.get(rank, {}).get("launched", -1))


def blame(answers: Answers, rank: int, launched: int, tag: str, waited_s: float) -> dict[int, str]:
    """Return reasons by the ranks that are lost, or behind, or at last this rank's own.

    Args:
        answers: of all other ranks.
        rank: this one.
        launched: exchanges that it has launched.
        tag: of the exchange that failed.
        waited_s: how long it was waited for.
    """
    if answers.lost:
        return answers.lost
    behind = {other: n for other, n in answers.launched.items() if n < launched}
    if behind:
        return {
            other: f"answers, but has launched {n} exchanges where rank {rank} has launched"
            f" {launched}: it is slow or hangs; if it was only slow, make `timeout` longer"
            for other, n in behind.items()
        }
    return {
        rank: f"gave up on the exchange '{tag}' after {waited_s:.1f} s, although all other ranks"
        " that could be asked answer and are as far as it is; look at the network (a link that was"
        " down takes up to as long again: make `timeout` over twice an outage)"
    }


def failed_exchange(
    tag: str, rank: int, waited_s: float, cause: str, lost: Mapping[int, str]
) -> RuntimeError:
    """Return the error that names the `lost` ranks; `cause` is what was heard first."""
    first_line = cause.strip().split("\n")[0][:REASON_CHARACTERS]
    found = "; ".join(f"rank {other} {reason}" for other, reason in sorted(lost.items()))
    return RuntimeError(
        f"The exchange '{tag}' failed on rank {rank} after {waited_s:.1f} s ({first_line}):"
        f" {found}. {ADVICE}"
    )
