"""Recommend P, tau and H of Streaming DiLoCo for a bandwidth, with reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

from commfree_planner.pace import SYNC_EVERY
from commfree_planner.training import Training

# section 3 of the paper: utilization does not grow beyond 5, and the loss is worse at 20
MOST_OVERLAP_STEPS = 5
_LENGTHS = (*SYNC_EVERY, 300)  # the last is the largest H of arXiv:2503.09799
_FIXABLE = ("sync_every", "overlap_steps")


class Candidate(NamedTuple):
    """A setting and its utilization."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilization: float


@dataclass(frozen=True)
class Advice:
    """A fixed setting of `StreamingDiLoCoStrategy`, with reasons.

    Attributes:
        sync_every: H.
        num_fragments: P.
        overlap_steps: tau.
        utilization: of this setting.
        reaches_target: whether the utilization reaches the target.
        fixed: which of `sync_every` and `overlap_steps` the user has fixed.
        reasons: complete sentences.
    """

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilization: float
    reaches_target: bool
    fixed: tuple[str, ...]
    reasons: tuple[str, ...]

    def lines(self, target: float) -> list[str]:
        """Return the setting and the reasons as lines of text."""
        which = f"your {' and '.join(self.fixed)}"
        if not self.fixed:
            which = "a fixed sync_every, for runs that are equal bit for bit"
        verdict = "reaches" if self.reaches_target else "does not reach"
        return [
            f"streaming_diloco with {which}: sync_every={self.sync_every}"
            f" num_fragments={self.num_fragments} overlap_steps={self.overlap_steps}: utilization"
            f" {self.utilization:.1%}, which {verdict} {target:.0%}.",
            *(f"- {reason}" for reason in self.reasons),
        ]


def advise(
    training: Training, gbit_per_s: float, target: float, fixed: Collection[str] = ()
) -> Advice:
    """Return the fixed setting with the smallest H that reaches the target.

    A smaller H lowers the loss, so a longer cycle comes last. Within an H it prefers the smallest
    tau from the default of 1 on, because a landing is tau steps late, and then the P closest to the
    model's default. The wire format is the training's, and so is its `num_fragments` unless it is
    None.

    Args:
        training: the run.
        gbit_per_s: bandwidth of a replica, in Gbit/s.
        target: utilization to reach, in (0, 1).
        fixed: `sync_every`, `overlap_steps`, both or none: the training's values that the user has
            fixed. The advice keeps them; the others are ignored.

    Raises:
        ValueError: bandwidth or target outside their range.
    """
    if not 0 < target < 1:
        raise ValueError(
            f"`advice_target={target}` must be strictly between 0 and 1: it is the share of the"
            " time in which the machines compute. Pass, for example, 0.95."
        )
    fixed = tuple(name for name in _FIXABLE if name in fixed)
    best = _best(training, gbit_per_s, target, fixed)
    reaches = best.utilization >= target
    reasons = tuple(_reasons(training, best, gbit_per_s, target, fixed))
    return Advice(*best, reaches, fixed, reasons)


def plain(number: float, digits: int = 3) -> str:
    """Format with so many significant digits and without an exponent: 0.0123, 1.23, 1,230."""
    return f"{Decimal(f'{number:.{digits}g}'):,f}"


def _best(
    training: Training, gbit_per_s: float, target: float, fixed: Collection[str]
) -> Candidate:
    """Return the first candidate that reaches the target, or the one with the best utilization."""
    best: Candidate | None = None
    for candidate in _candidates(training, gbit_per_s, fixed):
        if candidate.utilization >= target:
            return candidate
        if best is None or candidate.utilization > best.utilization:
            best = candidate
    assert best is not None, "the training's own setting is valid"
    return best


def _candidates(
    training: Training, gbit_per_s: float, fixed: Collection[str]
) -> Iterator[Candidate]:
    """Yield settings and their utilizations, the most preferred first."""
    given = training.overlap_steps if "overlap_steps" in fixed else None
    lengths = [training.sync_every]
    if "sync_every" not in fixed:  # a fragment must land before it leaves again
        lengths = [h for h in _LENGTHS if given is None or h > given] or lengths
    for sync_every in lengths:
        most = min(MOST_OVERLAP_STEPS, sync_every - 1)
        for tau in range(min(1, most), most + 1) if given is None else (given,):
            paced = replace(training, sync_every=sync_every, overlap_steps=tau)
            for count in _fragment_counts(training):
                exchange = paced.diloco(count, tau, training.wire_dtype)
                reached = paced.utilization(exchange, gbit_per_s)
                yield Candidate(sync_every, count, tau, reached)


def _fragment_counts(training: Training) -> list[int]:
    """Return the training's P, or one for each number of blocks per fragment, and 1.

    The closest to the model's default comes first.
    """
    if training.num_fragments is not None:
        return [training.num_fragments]
    default, blocks = training.model.default_num_fragments, len(training.model.block_params)
    counts = {
        -(-blocks // size) + bool(training.model.rest_params) for size in range(1, blocks + 1)
    }
    return sorted(counts | {1}, key=lambda count: (abs(count - default), count))


def _reasons(
    training: Training, best: Candidate, gbit_per_s: float, target: float, fixed: Collection[str]
) -> Iterator[str]:
    if training.num_replicas == 1:
        yield "One replica sends nothing, so it never waits."
        return
    training = replace(training, sync_every=best.sync_every, overlap_steps=best.overlap_steps)
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
    if training.num_fragments is None and best.num_fragments != default:
        yield (
            f"With the default of {default} fragments, overlap_steps={best.overlap_steps} reaches"
            f" {_default_p_utilization(training, best, gbit_per_s):.1%}."
        )
    if best.utilization < target:
        needed = training.needed_gbit_per_s(exchange, target)
        yield (
            f"{_searched(training, fixed)} stays below {target:.0%} at {gbit_per_s:g} Gbit/s;"
            f" this setting needs {plain(needed)} Gbit/s."
        )
    coded = training.diloco(best.num_fragments, best.overlap_steps, "fp4")
    ratio = exchange.bytes_per_cycle / coded.bytes_per_cycle
    if ratio > 1:
        yield f"wire_dtype=fp4 sends {ratio:.1f} times fewer bytes."


def _searched(training: Training, fixed: Collection[str]) -> str:
    """Return the subject of a sentence about all settings that were tried."""
    free = ["any num_fragments"] if training.num_fragments is None else []
    if "overlap_steps" not in fixed:
        free.append(f"overlap_steps up to {MOST_OVERLAP_STEPS}")
    if "sync_every" not in fixed:
        free.append(f"sync_every up to {_LENGTHS[-1]}")
    return f"Training with {' and '.join(free)}" if free else "Training"


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
