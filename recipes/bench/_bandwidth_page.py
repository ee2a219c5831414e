"""The result page of `recipes.bench.bandwidth`, from its raw results alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_commfree.comm.ledger import ring_all_reduce_bytes
from recipes.bench.netlab import BURST_KIB

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
CHAIN = ("ddp", "diloco", "streaming", "overlap", "overlap_fp4")  # each adds to the one before it
HEADLINE_RATE = "100mbit"
FEWEST_ROUNDS = 3  # of fewer a median does not leave an interruption out

Turn = tuple[int | None, int]  # call and round: what has the same took turns


@dataclass(frozen=True)
class Cell:
    """One row of the table at one rate: medians over the rounds, of the slower node."""

    ms_by_round: Mapping[Turn, float]  # a window's mean step
    steps_by_round: Mapping[Turn, NDArray[np.float64]]  # ms, nodes x steps; where they were kept
    own_ms: float | None  # per step, of the strategy itself; None: nobody measured it
    step_ms: float
    wire_bytes: float  # per step and node
    ledger_bytes: float | None
    ledger_is_counted: bool
    waited_ms: float | None  # per step, of the node that waited longer; None: nobody counted

    def step_by_step_ms(self, turns: Iterable[Turn] | None = None) -> float | None:
        """Return the mean over the window's steps of each step's median over the rounds.

        Of the slower node. What interrupts the machine for seconds lies elsewhere in every round
        and falls out; what a step costs in every round, a sync among them, stays.

        Args:
            turns: of which rounds; None means all.

        Returns:
            Milliseconds; None where fewer than `FEWEST_ROUNDS` rounds kept their steps.
        """
        chosen = self.steps_by_round if turns is None else turns
        kept = [self.steps_by_round[turn] for turn in chosen if turn in self.steps_by_round]
        if len(kept) < FEWEST_ROUNDS:
            return None
        return float(np.median(kept, axis=0).mean(axis=1).max())


def cells(
    records: Sequence[dict[str, Any]], rate: str, labels: Mapping[str, str] = LABELS
) -> dict[str, Cell | str]:
    """Return the cells of a rate by row, in the table's order; for a row that failed, its error."""
    found: dict[str, Cell | str] = {}
    for row in labels:
        mine = [r for r in records if r["rate"] == rate and r["row"] == row]
        # an older version did not keep which call had measured
        rounds = {(r.get("call"), r["round"]): r["nodes"] for r in mine}
        errors = [node["error"] for nodes in rounds.values() for node in nodes if node["error"]]
        if errors:
            found[row] = errors[0]
        elif rounds:
            found[row] = _cell(row, rounds)
    return found


def _cell(row: str, rounds: Mapping[Turn, Sequence[dict[str, Any]]]) -> Cell:
    nodes = [node for round_ in rounds.values() for node in round_]
    step_ms = {
        turn: max(1e3 * node["seconds"] / node["steps"] for node in round_)
        for turn, round_ in rounds.items()
    }
    waited_ms = [
        max(1e3 * node["waited_s"] / node["steps"] for node in round_)
        for round_ in rounds.values()
        if all(node.get("waited_s") is not None for node in round_)
    ]
    counted = [node["ledger_bytes"] / node["steps"] for node in nodes if node["ledger_bytes"]]
    # DDP has no ledger: the formula that the ledger uses for this collective
    num_bytes = 4 * nodes[0]["parameters"]
    computed = None
    if row == "ddp":
        computed = ring_all_reduce_bytes(num_bytes, len(next(iter(rounds.values()))))
    return Cell(
        ms_by_round=step_ms,
        steps_by_round={
            turn: 1e3 * np.array([node["step_s"] for node in round_])
            for turn, round_ in rounds.items()
            if all(node.get("step_s") for node in round_)
        },
        own_ms=_own_ms(list(rounds.values())),
        step_ms=statistics.median(step_ms.values()),
        wire_bytes=statistics.median(node["wire_bytes"] / node["steps"] for node in nodes),
        ledger_bytes=statistics.median(counted) if counted else computed,
        ledger_is_counted=bool(counted),
        waited_ms=statistics.median(waited_ms) if waited_ms else None,
    )


def _own_ms(rounds: Sequence[Sequence[dict[str, Any]]]) -> float | None:
    """Return how long the strategy holds up training, per step, but for waiting for a slower node.

    Of what it took at the end of each step: of the node that took less, for the other one came
    first and waited; of these the medians over the rounds, and their mean over the steps.
    """
    kept = [round_ for round_ in rounds if all(node.get("own_s") for node in round_)]
    if not kept:
        return None
    own = [np.array([node["own_s"] for node in round_]).min(axis=0) for round_ in kept]
    return 1e3 * float(np.median(own, axis=0).mean())


def table(found: dict[str, Cell | str], labels: Mapping[str, str] = LABELS) -> list[str]:
    """Return the table of one rate as lines of Markdown; `none` gives the utilization.

    Times that no row has are left out.
    """
    more: dict[str, Callable[[Cell], float | None]] = {
        "step by step": Cell.step_by_step_ms,
        "waited": lambda cell: cell.waited_ms,
        "own": lambda cell: cell.own_ms,
    }
    measured = [cell for cell in found.values() if isinstance(cell, Cell)]
    times: dict[str, Callable[[Cell], float | None]] = {"ms a step": lambda cell: cell.step_ms}
    times |= {k: ms for k, ms in more.items() if any(ms(cell) is not None for cell in measured)}
    after = ["utilization", "bytes a step, interface", "bytes a step, ledger", "rounds"]
    lines = [f"| | {' | '.join([*times, *after])} |", "|---" * (1 + len(times) + len(after)) + "|"]
    none = found.get("none")
    for row, cell in found.items():
        if isinstance(cell, str):
            empty = " |" * (len(times) + len(after) - 1)
            lines.append(f"| {labels[row]} | did not run: {cell} |{empty}")
            continue
        shown = ["-" if (one := ms(cell)) is None else f"{one:.1f}" for ms in times.values()]
        share = f"{100 * none.step_ms / cell.step_ms:.1f} %" if isinstance(none, Cell) else "-"
        ledger = "-" if cell.ledger_bytes is None else f"{cell.ledger_bytes:,.0f}"
        if cell.ledger_bytes is not None and not cell.ledger_is_counted:
            ledger += " (computed)"
        shown += [share, f"{cell.wire_bytes:,.0f}", ledger, str(len(cell.ms_by_round))]
        lines.append(f"| {labels[row]} | {' | '.join(shown)} |")
    return lines


def chain(found: dict[str, Cell | str]) -> list[str]:
    """Return for every row of `CHAIN` whether it is no slower than the one before it.

    Step by step where enough rounds kept their steps, else by the windows' means.
    """
    lines = []
    for before, after in pairwise(CHAIN):
        first, second = found.get(before), found.get(after)
        if not (isinstance(first, Cell) and isinstance(second, Cell)):
            continue
        ratio, ratios = _compared(second, first)
        reach = f" (by round {', '.join(f'{r:.3f}' for r in ratios)})" if ratios[1:] else ""
        verdict = _verdict(ratio, ratios)
        steps = _compared_step_by_step(second, first)
        if steps is not None:
            by_step, without_one = steps
            reach += f"; step by step {by_step:.4f}"
            if without_one:
                low, high = min(without_one), max(without_one)
                reach += f" ({low:.4f} to {high:.4f} with any one round left out)"
            verdict = _verdict_of_steps(by_step, without_one)
        text = f"{ratio:.4f} of its time{reach}; not slower {verdict}"
        if first.own_ms is not None and second.own_ms is not None:
            more = "does not hold" if second.own_ms > first.own_ms else "holds"
            text += (
                f". It holds training up for {second.own_ms:.2f} ms a step, the other for"
                f" {first.own_ms:.2f}: by that it {more}"
            )
        lines.append(f"- {LABELS[after]}, against {LABELS[before]}: {text}.")
    return lines


def noise(found: dict[str, Cell | str]) -> list[str]:
    """Return how far the rounds of one row lie apart, where nothing but the machine changes."""
    none = found.get("none")
    if not isinstance(none, Cell) or len(none.ms_by_round) < 2:
        return []
    steps = none.ms_by_round.values()
    return [
        f"- No communication itself took {min(steps):.1f} to {max(steps):.1f} ms by round: what"
        " differs by less in single rounds says nothing."
    ]


def _compared(ours: Cell, other: Cell) -> tuple[float, list[float]]:
    """Return the ratio of the median steps, and the rounds' ratios in ascending order.

    Of the rounds in which both took turns; where there is none, of all, and without rounds' ratios.
    """
    both = ours.ms_by_round.keys() & other.ms_by_round.keys()
    if not both:
        return ours.step_ms / other.step_ms, []
    medians = [statistics.median(c.ms_by_round[turn] for turn in both) for c in (ours, other)]
    by_round = sorted(ours.ms_by_round[turn] / other.ms_by_round[turn] for turn in both)
    return medians[0] / medians[1], by_round


def _compared_step_by_step(ours: Cell, other: Cell) -> tuple[float, list[float]] | None:
    """Return the ratio of the steps' medians, and the same with each of the rounds left out.

    Of the rounds in which both took turns and kept their steps; None where they are too few.
    """
    both = ours.steps_by_round.keys() & other.steps_by_round.keys()

    def ratio(turns: Collection[Turn]) -> float | None:
        mine, its = ours.step_by_step_ms(turns), other.step_by_step_ms(turns)
        return None if mine is None or its is None else mine / its

    of_all = ratio(both)
    if of_all is None:
        return None
    without_one = [ratio(both - {turn}) for turn in both]
    return of_all, [r for r in without_one if r is not None]


def _verdict(ratio: float, by_round: Sequence[float]) -> str:
    if ratio <= 1:
        return "holds"
    if by_round and 2 * sum(one <= 1 for one in by_round) >= len(by_round):
        return "is not told: in half of the rounds or more it holds"
    return "does not hold"


def _verdict_of_steps(ratio: float, without_one: Sequence[float]) -> str:
    if without_one and min(without_one) <= 1 < max(without_one):
        return "cannot be told: it turns with a round left out"
    return "holds" if ratio <= 1 else "does not hold"


def headline(found: dict[str, Cell | str]) -> list[str]:
    """Return the targets of the last row against no communication and DDP, with the figures."""
    none, ddp, ours = (found.get(row) for row in ("none", "ddp", "overlap_fp4"))
    if not (isinstance(none, Cell) and isinstance(ddp, Cell) and isinstance(ours, Cell)):
        return [f"Not measured: it takes no communication, DDP and fp4 at {HEADLINE_RATE}."]
    lines = ["| target | figure | |", "|---|---|---|"]
    (slower, _), (faster, _) = _compared(ours, none), _compared(ddp, ours)
    lines.append(target("step time / no communication, at most 1.03", slower, slower <= 1.03))
    lines.append(target("DDP's step time / step time, at least 5", faster, faster >= 5))
    fewer = ddp.wire_bytes / ours.wire_bytes
    lines.append(target("DDP's interface bytes / ours, at least 500", fewer, fewer >= 500))
    assert ours.ledger_bytes is not None, "our strategies count"
    agreement = ours.wire_bytes / ours.ledger_bytes
    within = abs(agreement - 1) <= 0.03
    lines.append(target("interface / ledger, within 3 %", agreement, within))
    return lines


def target(text: str, figure: float, met: bool) -> str:
    """Return a row of a table of targets."""
    return f"| {text} | {figure:.4g} | {'met' if met else 'missed'} |"


def page_lines(raw: dict[str, Any], rates: Sequence[str]) -> list[str]:
    """Return the page below its provenance.

    Args:
        raw: `settings` and `records` of `recipes.bench.bandwidth`.
        rates: in the order of the page.
    """
    settings = raw["settings"]
    lines = [f"## At {HEADLINE_RATE}: no communication, DDP and Streaming DiLoCo", ""]
    lines += headline(cells(raw["records"], HEADLINE_RATE))
    for rate in rates:
        found = cells(raw["records"], rate)
        lines += ["", f"## {rate}", "", *table(found), "", *chain(found), *noise(found)]
    return [
        *lines,
        "",
        "## How it was measured",
        "",
        "Two nodes of the network laboratory (`recipes/bench/netlab.py`), every link shaped to the"
        f" rate, delay not shaped; after a pause the first {BURST_KIB} KiB pass unshaped. GPT-2"
        " with 5.8 million parameters, random tokens, batch 4 x 128 a rank, one thread a rank,"
        " AdamW,"
        f" H={settings['sync_every']}. In a round every row runs"
        " once, one `Trainer.fit` after the other in the same pair of processes (torchft, which is"
        " no Lightning strategy, with a loop of its own in processes of its own, in the first round"
        " only); the order rotates from round to round. Where several calls are named above, a"
        " ratio of two rows is of the rounds in which one call measured both. A figure is the"
        " median over the rounds of a window's mean step, of the slower node;"
        " bytes are the median over nodes and rounds of what one node sent. Step by step: of every"
        " step of the window the median over the rounds, and of these the mean, so that what stops"
        " the machine for seconds, elsewhere in every round, falls out, and what a step costs in"
        " every round stays; what a node waits for one that was stopped falls out too. Where"
        f" {FEWEST_ROUNDS} rounds or more kept their steps, it decides whether a row is slower"
        " than the one before it. What computes the same differs by several per cent from fit to"
        " fit on this machine. Own: how long the strategy itself holds up training, at the end of"
        " steps, waiting for the link included, of the node that took less (the other one had come"
        " first, and waited for it); with what the first launch of a fit takes once, in a window of"
        " one cycle.",
        "",
        f"The window of a DiLoCo row is {settings['cycles']} whole cycle(s) in the steady state. A"
        " fit is silent for its first H steps; for the timing its step counter starts a few steps"
        " before H, so that the window begins with the first launch, and what is exchanged at the"
        f" end of a fit lies outside. The others' window is {settings['steps']} steps, of DDP's"
        " rows fewer on a slow link. No communication: a plain Trainer a node, both at once."
        " Utilization: its step time over the row's. Waited: milliseconds a step in which a rank"
        " stood still for others, as the strategy's ledger has it, of the node that waited longer."
        " Lightning broadcasts a flag before every batch, which is part of DDP's rows; it ignores"
        " `ddp_comm_hook` on the CPU, so a subclass registers the hook.",
    ]
