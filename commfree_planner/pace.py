"""How often Streaming DiLoCo exchanges with `sync_every="auto"`.

The library calls `choose_pace` with what it measures, the planner with what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from commfree_planner.training import Training

# A short list, so that two fits on the same machines choose alike. It ends at 10: with 5, losses
# were not lower, and the work for an exchange becomes noticeable.
SYNC_EVERY = (10, 20, 30, 50, 100, 200)
# From 5, so that a replica does not wait for one that is a few steps behind.
OVERLAP_STEPS = (5, 10, 15, 20, 30, 50, 75, 100)
_RESERVE = 1.25  # of the link's time, before H grows
# Largest share of a replica's own work for exchanges, before H grows. It is worth its time: for the
# same loss, two replicas of a GPT-2 with 0.2M parameters need 1.10 times DDP's tokens with H = 10,
# where it is 1.5 %, and 1.21 times with H = 20 (`benchmarks/size_ladder/result.md`).
_WORK = 0.02
_BEFORE_FALLING = 1.25  # more reserve of both, so that H does not go back and forth


def choose_pace(
    links: Sequence[float], work: float, sync_every: int, overlap_steps: int, least_overlap: int
) -> tuple[int, int]:
    """Return the H and tau to change to.

    H is the smallest of `SYNC_EVERY` for which the link is busy for at most 80 % of a cycle and the
    replica's own work takes at most 2 %. tau is the smallest of `OVERLAP_STEPS`, and at least
    `least_overlap`, in which the largest fragment arrives.

    Args:
        links: duration of each fragment's exchange, in inner steps.
        work: of a replica for all fragments in a cycle, in inner steps.
        sync_every: H now.
        overlap_steps: tau now.
        least_overlap: tau is not smaller.
    """
    least = max(_RESERVE * max(links), least_overlap)
    overlaps = sorted({least_overlap, *OVERLAP_STEPS})
    tau = next((tau for tau in overlaps if tau >= least), overlaps[-1])

    def smallest_h(reserve: float) -> int:
        need = max(reserve * max(_RESERVE * sum(links), work / _WORK), tau + 2)
        return next((h for h in SYNC_EVERY if h >= need), SYNC_EVERY[-1])

    up, down = smallest_h(1.0), smallest_h(_BEFORE_FALLING)
    wanted = up if up > sync_every else min(down, sync_every)
    # what is in flight must land before its fragment's next launch: H may have to wait for tau
    chosen = next(h for h in SYNC_EVERY if h >= max(wanted, overlap_steps + 2))
    if wanted == sync_every:
        tau = max(tau, overlap_steps)
    return chosen, tau


def auto_pace(training: Training, gbit_per_s: float) -> tuple[int, int]:
    """Return the H and tau on which `sync_every="auto"` settles; the training's are ignored.

    TCP's windows and losses are not counted.
    """
    overlap = OVERLAP_STEPS[0]
    exchange = training.diloco(training.fragment_count, overlap, training.wire_dtype)
    links = [
        (8e-9 * message.num_bytes / gbit_per_s + message.rounds * training.latency_s)
        / training.step_seconds
        for (message,) in exchange.fragments
    ]
    work = exchange.sync_seconds / training.step_seconds
    now = SYNC_EVERY[0], overlap
    while (then := choose_pace(links, work, *now, overlap)) != now:
        now = then
    return now


class AutoPlan(NamedTuple):
    """What `sync_every="auto"` settles on, and the utilization then."""

    sync_every: int
    overlap_steps: int
    utilization: float


def plan_auto(training: Training, gbit_per_s: float) -> AutoPlan:
    """Return the plan of `sync_every="auto"`; the training's H and tau are ignored."""
    sync_every, overlap_steps = auto_pace(training, gbit_per_s)
    found = replace(training, sync_every=sync_every, overlap_steps=overlap_steps)
    exchange = found.diloco(found.fragment_count, overlap_steps, found.wire_dtype)
    return AutoPlan(sync_every, overlap_steps, found.utilization(exchange, gbit_per_s))


def auto_line(training: Training, gbit_per_s: float) -> str:
    """Return a sentence about `sync_every="auto"`."""
    if training.num_replicas == 1:
        return 'streaming_diloco with sync_every="auto", its default: one replica sends nothing.'
    auto = plan_auto(training, gbit_per_s)
    return (
        'streaming_diloco with sync_every="auto", its default, would exchange every'
        f" {auto.sync_every} steps with overlap_steps={auto.overlap_steps}: utilization"
        f" {auto.utilization:.1%}."
    )
