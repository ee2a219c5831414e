"""What `benchmarks.bandwidth` measured, by rate and row: medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_commfree.comm.ledger import ring_all_reduce_bytes

LABELS = {
    "none": "no communication",
    "ddp": "DDP",
    "ddp_bf16": "DDP, bf16 hook",
    "ddp_powersgd": "DDP, PowerSGD rank 4",
    "diloco": "DiLoCo (P=1, overlap 0, fp32)",
    "streaming": "streaming (default fragments, overlap 0, fp32)",
    "overlap": "+ overlap 5",
    "overlap_fp4": "+ fp4",
    "torchft": "torchft DiLoCo, no delay",
    "torchft_delay": "torchft DiLoCo, delay 5, alpha 0.5",
}
FEWEST_ROUNDS = 3  # of fewer a median does not leave an interruption out

RoundOfCall = tuple[int | None, int]  # call and round


@dataclass(frozen=True)
class Figures:
    """One row of the table at one rate: medians over the rounds, of the slower node."""

    ms_by_round: Mapping[RoundOfCall, float]  # a window's mean step
    steps_by_round: Mapping[
        RoundOfCall, NDArray[np.float64]
    ]  # ms, nodes x steps; where they were kept
    own_by_round: Mapping[
        RoundOfCall, NDArray[np.float64]
    ]  # ms of the strategy itself at each step, of the node that took less; where it was measured
    beside_ms: float | None  # CPU time per step in other threads, of the node with more of it
    step_ms: float
    wire_bytes: float  # per step and node
    ledger_bytes: float | None
    ledger_is_counted: bool
    waited_ms: float | None  # per step, of the node that waited longer; None: nobody counted

    def step_by_step_ms(self, rounds: Iterable[RoundOfCall] | None = None) -> float | None:
        """Return the mean over the window's steps of each step's median over the rounds.

        Of the slower node. What interrupts the machine for seconds lies elsewhere in every round
        and falls out; what a step costs in every round, a sync among them, stays.

        Args:
            rounds: of which ones; None means all.

        Returns:
            Milliseconds; None where fewer than `FEWEST_ROUNDS` rounds kept their steps.
        """
        chosen = self.steps_by_round if rounds is None else rounds
        kept = [self.steps_by_round[key] for key in chosen if key in self.steps_by_round]
        if len(kept) < FEWEST_ROUNDS:
            return None
        return float(np.median(kept, axis=0).mean(axis=1).max())

    def own_ms(self, but_for: RoundOfCall | None = None) -> float | None:
        """Return how long the strategy holds up training, without waiting for a slower node.

        Of what it took at the end of each step: of the node that took less, for the other one came
        first and waited; of these the medians over the rounds, and their mean over the steps.

        Args:
            but_for: a round that is left out.

        Returns:
            Milliseconds a step; None where nobody measured it.
        """
        own = [steps_ms for key, steps_ms in self.own_by_round.items() if key != but_for]
        return float(np.median(own, axis=0).mean()) if own else None


def figures_by_row(
    records: Sequence[dict[str, Any]], rate: str, labels: Mapping[str, str] = LABELS
) -> dict[str, Figures | str]:
    """Return the figures of a rate by row, in the table's order; what only failed has its error."""
    found: dict[str, Figures | str] = {}
    for row in labels:
        mine = [r for r in records if r["rate"] == rate and r["row"] == row]
        # an older version did not keep which call had measured
        rounds = {(r.get("call"), r["round"]): r["nodes"] for r in mine}
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
    # DDP has no ledger: the formula that the ledger uses for this collective
    num_bytes = 4 * nodes[0]["parameters"]
    computed = None
    if row == "ddp":
        computed = ring_all_reduce_bytes(num_bytes, len(next(iter(rounds.values()))))
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
    """Return ms a step of the node with most of it, median over the rounds that measured it."""
    found = [
        max(1e3 * node[key] / node["steps"] for node in round_)
        for round_ in rounds.values()
        if all(node.get(key) is not None for node in round_)
    ]
    return statistics.median(found) if found else None
