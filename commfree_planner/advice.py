"""Which P and tau a run should take at its bandwidth, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from commfree_planner.training import Training

MOST_OVERLAP_STEPS = (
    5  # section 3 of the paper: utilization stops growing there, loss suffers at 20
)
MOST_SYNC_EVERY = 300  # the largest H of arXiv:2503.09799


class Candidate(NamedTuple):
    """One setting and what it reaches."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilization: float


@dataclass(frozen=True)
class Advice:
    """A setting for `StreamingDiLoCoStrategy`, and the reasons in sentences.

    Attributes:
        sync_every: H; the training's, unless no P and tau reach the target with it.
        num_fragments: P.
        overlap_steps: tau.
        utilization: that this setting reaches.
        reaches_target: whether that is enough.
        reasons: complete sentences.
    """

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilization: float
    reaches_target: bool
    reasons: tuple[str, ...]


def advise(training: Training, gbit_per_s: float, target: float) -> Advice:
    """Return the least change of the paper's setting that reaches the target.

    In this order: the shortest delay, because a landing is tau steps late; then the P nearest to
    the model's default; only then a longer cycle, because a larger H costs loss. The wire format is
    the training's.

    Args:
        training: the run; its own P and tau do not count.
        gbit_per_s: bandwidth of a replica, in Gbit/s.
        target: utilization to reach, in (0, 1).

    Raises:
        ValueError: bandwidth or target outside their range.
    """
    if not 0 < target < 1:
        raise ValueError(
            f"`advice_target={target}` must lie strictly between 0 and 1: it is the share of the"
            " time in which the machines shall compute. Give, for example, 0.95."
        )
    best = _best(training, gbit_per_s, target)
    if best.utilization < target:
        best = _with_longer_cycles(training, gbit_per_s, target) or best
    reaches = best.utilization >= target
    return Advice(*best, reaches, tuple(_reasons(training, best, gbit_per_s, target)))


def _best(training: Training, gbit_per_s: float, target: float) -> Candidate:
    """Return the first candidate that reaches the target, otherwise the one that comes nearest."""
    best: Candidate | None = None
    for tau in range(min(MOST_OVERLAP_STEPS, training.sync_every - 1) + 1):
        for count in _fragment_counts(training):
            exchange = training.diloco(count, tau, training.wire_dtype)
            reached = training.utilization(exchange, gbit_per_s)
            candidate = Candidate(training.sync_every, count, tau, reached)
            if reached >= target:
                return candidate
            if best is None or reached > best.utilization:
                best = candidate
    assert best is not None, "tau = 0 with the default P is always a candidate"
    return best


def _fragment_counts(training: Training) -> list[int]:
    """Return a P for each number of blocks per fragment, and 1; the default first."""
    default, blocks = training.model.default_num_fragments, len(training.model.block_params)
    counts = {
        -(-blocks // size) + bool(training.model.rest_params) for size in range(1, blocks + 1)
    }
    return sorted(counts | {1}, key=lambda count: (abs(count - default), count))


def _with_longer_cycles(training: Training, gbit_per_s: float, target: float) -> Candidate | None:
    """Return the shortest cycle that reaches the target; None where none is short enough."""
    too_short, enough = training.sync_every, MOST_SYNC_EVERY
    if enough <= too_short:
        return None
    found = _best(replace(training, sync_every=enough), gbit_per_s, target)
    if found.utilization < target:
        return found
    while enough - too_short > 1:
        middle = (too_short + enough) // 2
        candidate = _best(replace(training, sync_every=middle), gbit_per_s, target)
        if candidate.utilization >= target:
            enough, found = middle, candidate
        else:
            too_short = middle
    return found


def _reasons(
    training: Training, best: Candidate, gbit_per_s: float, target: float
) -> Iterator[str]:
    if training.num_replicas == 1:
        yield "One replica sends nothing, so nothing is waited for."
        return
    training = replace(training, sync_every=best.sync_every)
    exchange = training.diloco(best.num_fragments, best.overlap_steps, training.wire_dtype)
    yield from _reasons_of_the_link(training, best, exchange.bytes_per_cycle, gbit_per_s)
    steps = exchange.bytes_at_once * 8e-9 / gbit_per_s / training.step_seconds
    yield (
        f"The largest of {best.num_fragments} fragments is on the link for {steps:.2g} steps;"
        f" overlap_steps={best.overlap_steps} hides {min(steps, best.overlap_steps):.2g} of them."
    )
    default = training.model.default_num_fragments
    if best.num_fragments != default:
        yield (
            f"With the default of {default} fragments overlap_steps={best.overlap_steps} would give"
            f" {_with_default(training, best, gbit_per_s):.1%}."
        )
    if best.utilization < target:
        needed = training.needed_gbit_per_s(exchange, target)
        yield (
            f"No P, no overlap_steps up to {MOST_OVERLAP_STEPS} and no sync_every up to"
            f" {max(MOST_SYNC_EVERY, best.sync_every)} reach {target:.0%} at {gbit_per_s:g} Gbit/s;"
            f" this setting would need {needed:.3g} Gbit/s."
        )
    if training.wire_dtype != "fp4":
        coded = training.diloco(best.num_fragments, best.overlap_steps, "fp4")
        ratio = exchange.bytes_per_cycle / coded.bytes_per_cycle
        yield f"wire_dtype=fp4 would send {ratio:.1f} times fewer bytes."


def _reasons_of_the_link(
    training: Training, best: Candidate, cycle_bytes: float, gbit_per_s: float
) -> Iterator[str]:
    link_s = cycle_bytes * 8e-9 / gbit_per_s
    compute_s = best.sync_every * training.step_seconds
    yield (
        f"The {cycle_bytes / 1e6:,.4g} MB of a cycle take {link_s:.3g} s on the link and its"
        f" {best.sync_every} steps compute for {compute_s:.3g} s: the link must carry for"
        f" {link_s / compute_s:.0%} of the time that is computed."
    )


def _with_default(training: Training, best: Candidate, gbit_per_s: float) -> float:
    default = training.model.default_num_fragments
    exchange = training.diloco(default, best.overlap_steps, training.wire_dtype)
    return training.utilization(exchange, gbit_per_s)
