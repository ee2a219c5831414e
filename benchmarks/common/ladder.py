"""Learning-rate search on a ladder: the best rung is never at an end of the tried range."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LossAt = Callable[[int], float | None]  # loss at a rung; None: not run yet


def rungs_to_run(loss_at: LossAt, first: Sequence[int]) -> list[int]:
    """Return the rungs to run, in order, as far as the known losses determine them.

    Args:
        loss_at: known losses.
        first: adjacent rungs at which the search starts. It continues beyond either end until the
            best rung has a worse one on both sides.
    """
    rungs = list(first)
    while True:
        losses = {rung: loss_at(rung) for rung in rungs}
        known = {rung: loss for rung, loss in losses.items() if loss is not None}
        if len(known) < len(rungs):
            return rungs
        best = min(known, key=lambda rung: known[rung])
        if min(rungs) < best < max(rungs):
            return rungs
        rungs.append(best - 1 if best == min(rungs) else best + 1)


def best_rung(loss_at: LossAt, first: Sequence[int]) -> int | None:
    """Return the best rung of this search; None while a run is missing."""
    losses = {rung: loss_at(rung) for rung in rungs_to_run(loss_at, first)}
    known = {rung: loss for rung, loss in losses.items() if loss is not None}
    return min(known, key=lambda rung: known[rung]) if len(known) == len(losses) else None
