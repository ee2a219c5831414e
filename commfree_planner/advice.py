"""Recommend P, tau and H of Streaming DiLoCo for a bandwidth, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

from commfree_planner.training import Training

# section 3 of the paper: utilization does not grow beyond 5, and the loss is worse at 20
MOST_OVERLAP_STEPS = 5
MOST_SYNC_EVERY = 300  # the largest H of arXiv:2503.09799


class Candidate(NamedTuple):
    """A setting and its utilization."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilization: float


@dataclass(frozen=True)
class Advice:
    """A setting of `StreamingDiLoCoStrategy`, with reasons.

    Attributes:
        sync_every: H; the training's, unless it cannot reach the target with any P and tau.
        num_fragments: P.
        overlap_steps: tau.
        utilization: of this setting.
        reaches_target: whether the utilization reaches the target.
        reasons: complete sentences.
    """

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilization: float
    reaches_target: bool
    reasons: tuple[str, ...]


def advise(training: Training, gbit_per_s: float, target: float) -> Advice:
    """Return the setting closest to the paper's that reaches the target.

    It prefers the smallest tau, because a landing is tau steps late, then the P closest to the
    model's default, and only then a longer cycle, because a larger H costs loss. The wire format is
    the training's.

    Args:
        training: the run; its own P and tau are ignored.
        gbit_per_s: bandwidth of a replica, in Gbit/s.
        target: utilization to reach, in (0, 1).

    Raises:
        ValueError: bandwidth or target outside their range.
    """
    if not 0 < target < 1:
        raise ValueError(
            f"`advice_target={target}` must be strictly between 0 and 1: it is the share of the"
            " time in which the machines compute. Pass, for example, 0.95."
        )
    best = _best(training, gbit_per_s, target)
    if best.utilization < target:
        best = _with_longer_cycles(training, gbit_per_s, target) or best
    reaches = best.utilization >= target
    return Advice(*best, reaches, tuple(_reasons(training, best, gbit_per_s, target)))


def plain(number: float, digits: int = 3) -> str:
    """Format with so many significant digits and without an exponent: 0.0123, 1.23, 1,230."""
    return f"{Decimal(f'{number:.{digits}g}'):,f}"


def _best(training: Training, gbit_per_s: float, target: float) -> Candidate:
    """Return the first candidate that reaches the target, or the one with the best utilization."""
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
    """Return a P for each number of blocks per fragment, and 1, by distance from the default."""
    default, blocks = training.model.default_num_fragments, len(training.model.block_params)
    counts = {
        -(-blocks // size) + bool(training.model.rest_params) for size in range(1, blocks + 1)
    }
    return sorted(counts | {1}, key=lambda count: (abs(count - default), count))


def _with_longer_cycles(training: Training, gbit_per_s: float, target: float) -> Candidate | None:
    """Return the best setting with the smallest H that suffices, or the largest H, or None.

    None if the training's H is already larger.
    """
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
        yield "One replica sends nothing, so it never waits."
        return
    training = replace(training, sync_every=best.sync_every)
    exchange = training.diloco(best.num_fragments, best.overlap_steps, training.wire_dtype)
    yield from _link_reasons(training, best, exchange.bytes_per_cycle, gbit_per_s)
    steps = exchange.bytes_at_once * 8e-9 / gbit_per_s / training.step_seconds
    count = best.num_fragments
    largest = "The only fragment" if count == 1 else f"The largest of {count} fragments"
    hidden = min(steps, best.overlap_steps)
    yield (
        f"{largest} takes {plain(steps, 2)} steps on the link;"
        f" overlap_steps={best.overlap_steps} hides {plain(hidden, 2)} of them."
    )
    default = training.model.default_num_fragments
    if best.num_fragments != default:
        yield (
            f"With the default of {default} fragments, overlap_steps={best.overlap_steps} reaches"
            f" {_default_p_utilization(training, best, gbit_per_s):.1%}."
        )
    if best.utilization < target:
        needed = training.needed_gbit_per_s(exchange, target)
        yield (
            f"No num_fragments, overlap_steps up to {MOST_OVERLAP_STEPS} and sync_every up to"
            f" {max(MOST_SYNC_EVERY, best.sync_every)} reach {target:.0%} at {gbit_per_s:g} Gbit/s;"
            f" this setting needs {plain(needed)} Gbit/s."
        )
    coded = training.diloco(best.num_fragments, best.overlap_steps, "fp4")
    ratio = exchange.bytes_per_cycle / coded.bytes_per_cycle
    if ratio > 1:
        yield f"wire_dtype=fp4 sends {ratio:.1f} times fewer bytes."


def _link_reasons(
    training: Training, best: Candidate, cycle_bytes: float, gbit_per_s: float
) -> Iterator[str]:
    link_s = cycle_bytes * 8e-9 / gbit_per_s
    compute_s = best.sync_every * training.step_seconds
    yield (
        f"The {plain(cycle_bytes / 1e6, 4)} MB of a cycle take {plain(link_s)} s on the link, and"
        f" its {best.sync_every} steps compute for {plain(compute_s)} s: the link is busy for"
        f" {link_s / compute_s:.0%} of the compute time."
    )


def _default_p_utilization(training: Training, best: Candidate, gbit_per_s: float) -> float:
    """Return the utilization of a setting with the default P instead of its own."""
    default = training.model.default_num_fragments
    exchange = training.diloco(default, best.overlap_steps, training.wire_dtype)
    return training.utilization(exchange, gbit_per_s)
