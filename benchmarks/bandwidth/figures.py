"""Medians of the bandwidth measurements over rounds, and whether one row is slower than another."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_commfree.comm.ledger import ring_all_reduce_bytes

ACCUMULATED = 8  # batches whose gradients DDP adds up before it sends them
LABELS = {
    "none": "no communication",
    "ddp": "DDP",
    "ddp_accumulate": f"DDP, gradients of {ACCUMULATED} batches",
    "ddp_bf16": "DDP, bf16 hook",
    "ddp_powersgd": "DDP, PowerSGD rank 4",
    "ddp_powersgd_1": "DDP, PowerSGD rank 1",
    "local_sgd": "local SGD (plain mean every 10 steps, fp32)",
    "diloco": "DiLoCo (P=1, overlap 0, fp32)",
    "streaming": "streaming (default fragments, overlap 0, fp32)",
    "overlap": "+ overlap 5",
    "overlap_fp4": "+ fp4",
    "auto": '`sync_every="auto"`, fp4',
    "torchft": "torchft DiLoCo, no delay",
    "torchft_delay": "torchft DiLoCo, delay 5, alpha 0.5",
    "torchft_often": "torchft DiLoCo every 10 steps, delay 4, alpha 0.5",
}
# the same training without communication, in the loop and processes of the row; other rows take
# turns with `none`
BASELINES = {
    "ddp_powersgd": "ddp_powersgd_none",
    "ddp_powersgd_1": "ddp_powersgd_1_none",
    "torchft": "torchft_none",
    "torchft_delay": "torchft_delay_none",
    "torchft_often": "torchft_often_none",
}
FEWEST_ROUNDS = 3  # a median of fewer rounds does not remove an interruption

RoundOfCall = tuple[int, int]  # call and round


@dataclass(frozen=True)
class Figures:
    """One row of the table at one rate: medians over the rounds, of the slower node.

    Attributes:
        ms_by_round: mean step of a window.
        steps_by_round: ms of every step, nodes x steps; only of rounds that recorded steps.
        own_by_round: ms that the strategy itself took at each step, of the node that took less;
            only of rounds that measured it.
        beside_ms: CPU time of all other threads per step, of the node with more of it.
        step_ms: median of `ms_by_round`.
        wire_bytes: sent by the interface, per step and node.
        ledger_bytes: counted by the ledger or, for DDP, computed, per step and node.
        ledger_is_counted: False if `ledger_bytes` is computed.
        waited_ms: time waiting for other ranks per step, of the node that waited longer.
    """

    ms_by_round: Mapping[RoundOfCall, float]
    steps_by_round: Mapping[RoundOfCall, NDArray[np.float64]]
    own_by_round: Mapping[RoundOfCall, NDArray[np.float64]]
    beside_ms: float | None
    step_ms: float
    wire_bytes: float
    ledger_bytes: float | None
    ledger_is_counted: bool
    waited_ms: float | None

    def step_by_step_ms(self, rounds: Iterable[RoundOfCall] | None = None) -> float | None:
        """Return the mean over the window's steps of each step's median over the rounds.

        Of the slower node. This removes interruptions of the machine, which hit another step in
        every round, and keeps costs that occur in every round, such as a sync.

        Args:
            rounds: to use; None means all.

        Returns:
            Milliseconds; None if fewer than `FEWEST_ROUNDS` rounds recorded their steps.
        """
        chosen = self.steps_by_round if rounds is None else rounds
        kept = [self.steps_by_round[key] for key in chosen if key in self.steps_by_round]
        if len(kept) < FEWEST_ROUNDS:
            return None
        return float(np.median(kept, axis=0).mean(axis=1).max())

    def own_ms(self, but_for: RoundOfCall | None = None) -> float | None:
        """Return how long the strategy blocks training per step, without waiting for a slower node.

        Of the times at the end of each step, this takes the node with the smaller one (the other
        node came first and waited), the median over the rounds, and the mean over the steps.

        Args:
            but_for: a round to leave out.

        Returns:
            Milliseconds per step; None if it was not measured.
        """
        own = [steps_ms for key, steps_ms in self.own_by_round.items() if key != but_for]
        return float(np.median(own, axis=0).mean()) if own else None


def figures_by_row(
    records: Sequence[dict[str, Any]], rate: str, labels: Mapping[str, str] = LABELS
) -> dict[str, Figures | str]:
    """Return the figures at one rate by row, or the error of a row that always failed.

    The baselines of the rows in `labels` are included.
    """
    found: dict[str, Figures | str] = {}
    for row in (*labels, *(BASELINES[row] for row in labels if row in BASELINES)):
        mine = [r for r in records if r["rate"] == rate and r["row"] == row]
        rounds = {(r["call"], r["round"]): r["nodes"] for r in mine}
        errors = [node["error"] for nodes in rounds.values() for node in nodes if node["error"]]
        good = {
            key: nodes for key, nodes in rounds.items() if not any(node["error"] for node in nodes)
        }
        if good:
            found[row] = _figures(row, good)
        elif errors:
            found[row] = errors[0]
    return found


def _figures(row: str, rounds: Mapping[RoundOfCall, Sequence[dict[str, Any]]]) -> Figures:
    nodes = [node for round_ in rounds.values() for node in round_]
    step_ms = {
        key: max(1e3 * node["seconds"] / node["steps"] for node in round_)
        for key, round_ in rounds.items()
    }
    counted = [node["ledger_bytes"] / node["steps"] for node in nodes if node["ledger_bytes"]]
    # DDP has no ledger: use the ledger's formula for this collective
    num_bytes = 4 * nodes[0]["parameters"]
    computed = None
    if row in ("ddp", "ddp_accumulate"):
        computed = ring_all_reduce_bytes(num_bytes, len(next(iter(rounds.values()))))
        computed //= ACCUMULATED if row == "ddp_accumulate" else 1
    return Figures(
        ms_by_round=step_ms,
        steps_by_round={
            key: 1e3 * np.array([node["step_s"] for node in round_])
            for key, round_ in rounds.items()
            if all(node.get("step_s") for node in round_)
        },
        own_by_round={
            key: 1e3 * np.array([node["own_s"] for node in round_]).min(axis=0)
            for key, round_ in rounds.items()
            if all(node.get("own_s") for node in round_)
        },
        beside_ms=_median_of_worst(rounds, "beside_s"),
        step_ms=statistics.median(step_ms.values()),
        wire_bytes=statistics.median(node["wire_bytes"] / node["steps"] for node in nodes),
        ledger_bytes=statistics.median(counted) if counted else computed,
        ledger_is_counted=bool(counted),
        waited_ms=_median_of_worst(rounds, "waited_s"),
    )


def _median_of_worst(
    rounds: Mapping[RoundOfCall, Sequence[dict[str, Any]]], key: str
) -> float | None:
    """Return the median over rounds of the largest value among the nodes, in ms per step."""
    found = [
        max(1e3 * node[key] / node["steps"] for node in round_)
        for round_ in rounds.values()
        if all(node.get(key) is not None for node in round_)
    ]
    return statistics.median(found) if found else None


CHAIN = ("ddp", "diloco", "streaming", "overlap", "overlap_fp4")  # each extends the one before it
NOT_SLOWER, SLOWER = "not slower", "slower"


def chain_lines(found: dict[str, Figures | str]) -> list[str]:
    """Return for every row of `CHAIN` whether it is slower than the one before it.

    Step by step if enough rounds recorded their steps, otherwise by the means of the windows.
    """
    lines = []
    for before, after in pairwise(CHAIN):
        first, second = found.get(before), found.get(after)
        if not (isinstance(first, Figures) and isinstance(second, Figures)):
            continue
        ratio, ratios = compare(second, first)
        reach = f" (by round {', '.join(f'{r:.3f}' for r in ratios)})" if ratios[1:] else ""
        verdict = verdict_of_rounds(ratio, ratios)
        steps = compare_step_by_step(second, first)
        if steps is not None:
            by_step, without_one = steps
            reach += f"; step by step {by_step:.4f}"
            if without_one:
                low, high = min(without_one), max(without_one)
                reach += f" ({low:.4f} to {high:.4f} with any one round left out)"
            verdict = verdict_of_steps(by_step, without_one)
        text = f"{ratio:.4f} of its time{reach}: {verdict}"
        text += _own_time_text(second, first)
        if first.beside_ms is not None and second.beside_ms is not None:
            text += (
                f". Its other threads take {second.beside_ms:.2f} ms of CPU per step, the other"
                f" row's {first.beside_ms:.2f}"
            )
        lines.append(f"- {LABELS[after]}, against {LABELS[before]}: {text}.")
    return lines


def noise_lines(found: dict[str, Figures | str]) -> list[str]:
    """Return the spread of the row without communication, which only the machine causes."""
    none = found.get("none")
    if not isinstance(none, Figures) or len(none.ms_by_round) < 2:
        return []
    steps = none.ms_by_round.values()
    return [
        f"- No communication itself took {min(steps):.1f} to {max(steps):.1f} ms by round: compare"
        " rows within a round only."
    ]


def compare(ours: Figures, other: Figures) -> tuple[float, list[float]]:
    """Return the ratio of the median steps, and the ratios of the rounds in ascending order.

    Uses the rounds that both rows have. If there is none, it uses all rounds and returns no ratios
    of rounds.
    """
    both = ours.ms_by_round.keys() & other.ms_by_round.keys()
    if not both:
        return ours.step_ms / other.step_ms, []
    medians = [statistics.median(c.ms_by_round[key] for key in both) for c in (ours, other)]
    by_round = sorted(ours.ms_by_round[key] / other.ms_by_round[key] for key in both)
    return medians[0] / medians[1], by_round


def baseline(found: Mapping[str, Figures | str], row: str) -> tuple[float, float] | None:
    """Return the baseline's ms per step, and the share of time in which the row computes.

    Both are of the rounds in which the row and its baseline ran in the same loop; None if these are
    fewer than `FEWEST_ROUNDS`, or if one of the two failed.
    """
    ours, none = found.get(row), found.get(BASELINES.get(row, "none"))
    if not (isinstance(ours, Figures) and isinstance(none, Figures)):
        return None
    both = ours.ms_by_round.keys() & none.ms_by_round.keys()
    if len(both) < FEWEST_ROUNDS:
        return None
    return statistics.median(none.ms_by_round[key] for key in both), 1 / compare(ours, none)[0]


def compare_step_by_step(ours: Figures, other: Figures) -> tuple[float, list[float]] | None:
    """Return the ratio of the step-by-step times, and the same with each of the rounds left out.

    Uses the rounds in which both rows recorded their steps; None if there are too few.
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
    """Return the verdict on a ratio of medians, given the ratios of the rounds."""
    if ratio <= 1:
        return NOT_SLOWER
    if by_round and 2 * sum(one <= 1 for one in by_round) >= len(by_round):
        return "undecided, not slower in at least half of the rounds"
    return SLOWER


def _own_time_text(ours: Figures, other: Figures) -> str:
    """Return how long both rows block training, and a verdict; empty if it was not measured."""
    mine, its = ours.own_ms(), other.own_ms()
    if mine is None or its is None:
        return ""
    without_one = []
    if min(len(ours.own_by_round), len(other.own_by_round)) > FEWEST_ROUNDS:
        for key in ours.own_by_round.keys() | other.own_by_round.keys():
            mine_without, its_without = ours.own_ms(key), other.own_ms(key)
            assert mine_without is not None, "other rounds remain"
            assert its_without is not None, "other rounds remain"
            without_one.append(mine_without / its_without)
    own = [
        f"{ms:.2f} ms per step ({len(figures.own_by_round)} rounds)"
        for ms, figures in ((mine, ours), (its, other))
    ]
    verdict = verdict_of_steps(mine / its, without_one)
    return f". It blocks training for {own[0]}, the other row for {own[1]}: {verdict}"


def verdict_of_steps(ratio: float, without_one: Sequence[float]) -> str:
    """Return the verdict on a ratio, given the same ratio with each round left out."""
    if without_one and min(ratio, *without_one) <= 1 < max(ratio, *without_one):
        return "undecided, it changes if a round is left out"
    return NOT_SLOWER if ratio <= 1 else SLOWER
