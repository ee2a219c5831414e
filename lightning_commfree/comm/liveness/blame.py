"""Whom an exchange failed for, from what the ranks have answered; and the sentence about it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_commfree.comm.liveness.questions import Answers

REASON_CHARACTERS = 250
ADVICE = "Restart all ranks from the last checkpoint."


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
