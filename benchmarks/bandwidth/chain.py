"""Whether every row of `benchmarks.bandwidth` is no slower than the one that it adds to."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from itertools import pairwise

from benchmarks.bandwidth.figures import FEWEST_ROUNDS, LABELS, Figures, RoundOfCall

CHAIN = ("ddp", "diloco", "streaming", "overlap", "overlap_fp4")  # each adds to the one before it
NO_SLOWER, SLOWER = "no slower", "slower"


def chain(found: dict[str, Figures | str]) -> list[str]:
    """Return for every row of `CHAIN` whether it is no slower than the one before it.

    Step by step where enough rounds kept their steps, else by the windows' means.
    """
    lines = []
    for before, after in pairwise(CHAIN):
        first, second = found.get(before), found.get(after)
        if not (isinstance(first, Figures) and isinstance(second, Figures)):
            continue
        ratio, ratios = compared(second, first)
        reach = f" (by round {', '.join(f'{r:.3f}' for r in ratios)})" if ratios[1:] else ""
        verdict = verdict_of_rounds(ratio, ratios)
        steps = compared_step_by_step(second, first)
        if steps is not None:
            by_step, without_one = steps
            reach += f"; step by step {by_step:.4f}"
            if without_one:
                low, high = min(without_one), max(without_one)
                reach += f" ({low:.4f} to {high:.4f} with any one round left out)"
            verdict = verdict_of_steps(by_step, without_one)
        text = f"{ratio:.4f} of its time{reach}: {verdict}"
        text += _by_own_time(second, first)
        if first.beside_ms is not None and second.beside_ms is not None:
            text += (
                f". Beside the training its threads take {second.beside_ms:.2f} ms of CPU a step,"
                f" the other's {first.beside_ms:.2f}"
            )
        lines.append(f"- {LABELS[after]}, against {LABELS[before]}: {text}.")
    return lines


def noise(found: dict[str, Figures | str]) -> list[str]:
    """Return how far the rounds of one row lie apart, where nothing but the machine changes."""
    none = found.get("none")
    if not isinstance(none, Figures) or len(none.ms_by_round) < 2:
        return []
    steps = none.ms_by_round.values()
    return [
        f"- No communication itself took {min(steps):.1f} to {max(steps):.1f} ms by round: rows are"
        " to be compared within a round."
    ]


def compared(ours: Figures, other: Figures) -> tuple[float, list[float]]:
    """Return the ratio of the median steps, and the rounds' ratios in ascending order.

    Of the rounds that both have; where there is none, of all, and without rounds' ratios.
    """
    both = ours.ms_by_round.keys() & other.ms_by_round.keys()
    if not both:
        return ours.step_ms / other.step_ms, []
    medians = [statistics.median(c.ms_by_round[key] for key in both) for c in (ours, other)]
    by_round = sorted(ours.ms_by_round[key] / other.ms_by_round[key] for key in both)
    return medians[0] / medians[1], by_round


def compared_step_by_step(ours: Figures, other: Figures) -> tuple[float, list[float]] | None:
    """Return the ratio of the steps' medians, and the same with each of the rounds left out.

    Of the rounds that both have and in which both kept their steps; None where they are too few.
    """
    both = ours.steps_by_round.keys() & other.steps_by_round.keys()

    def ratio(rounds: Collection[RoundOfCall]) -> float | None:
        mine, its = ours.step_by_step_ms(rounds), other.step_by_step_ms(rounds)
        return None if mine is None or its is None else mine / its

    of_all = ratio(both)
    if of_all is None:
        return None
    without_one = [ratio(both - {key}) for key in both]
    return of_all, [r for r in without_one if r is not None]


def verdict_of_rounds(ratio: float, by_round: Sequence[float]) -> str:
    """Return the verdict on a ratio of medians and the ratios of the rounds."""
    if ratio <= 1:
        return NO_SLOWER
    if by_round and 2 * sum(one <= 1 for one in by_round) >= len(by_round):
        return "undecided, in half of the rounds or more it is no slower"
    return SLOWER


def _by_own_time(ours: Figures, other: Figures) -> str:
    """Return what both hold training up for, and the verdict by that; empty where it is unknown."""
    mine, its = ours.own_ms(), other.own_ms()
    if mine is None or its is None:
        return ""
    without_one = []
    if min(len(ours.own_by_round), len(other.own_by_round)) > FEWEST_ROUNDS:
        for key in ours.own_by_round.keys() | other.own_by_round.keys():
            mine_without, its_without = ours.own_ms(key), other.own_ms(key)
            assert mine_without is not None, "other rounds are left"
            assert its_without is not None, "other rounds are left"
            without_one.append(mine_without / its_without)
    own = [
        f"{ms:.2f} ms a step ({len(figures.own_by_round)} rounds)"
        for ms, figures in ((mine, ours), (its, other))
    ]
    verdict = verdict_of_steps(mine / its, without_one)
    return f". It holds training up for {own[0]}, the other for {own[1]}: by that it is {verdict}"


def verdict_of_steps(ratio: float, without_one: Sequence[float]) -> str:
    """Return the verdict on a ratio of all rounds, and the same with each of them left out."""
    if without_one and min(ratio, *without_one) <= 1 < max(ratio, *without_one):
        return "undecided, it turns with a round left out"
    return NO_SLOWER if ratio <= 1 else SLOWER
