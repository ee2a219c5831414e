"""The part `link`: two replicas of two ranks over a slow link, with and without syncs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bandwidth.chain import compared, compared_step_by_step
from benchmarks.bandwidth.figures import Figures, figures_by_row
from benchmarks.bandwidth.job import BATCH, TOKENS, VOCABULARY
from benchmarks.bandwidth.measure import HEAP, NODES, Results
from benchmarks.bandwidth.page import table, target
from benchmarks.bandwidth.window import LEG_STEPS
from benchmarks.lab import NetLab
from benchmarks.layouts.linked import ALONE, DOMINO
from benchmarks.layouts.memory import DDP, FSDP
from benchmarks.layouts.ranks import run_in_lab

RATE = "100mbit"
SLOWER, AGREE, ALIKE = 0.05, 0.03, 0.01  # how far from 1 the ratios of the targets may be
LABELS = {
    f"{DDP}_{ALONE}": "DDP inside, no syncs",
    DDP: "DDP inside, DiLoCo between",
    f"{FSDP}_{ALONE}": "FSDP2 inside, no syncs",
    FSDP: "FSDP2 inside, DiLoCo between",
    f"{DOMINO}_{ALONE}": "Domino inside, no syncs",
    DOMINO: "Domino inside, DiLoCo between",
}
LAYOUTS = (DDP, FSDP, DOMINO)
SETTINGS: dict[str, Any] = {
    "sync_every": 20,
    "ranks": 2,
    "layers": 6,
    "width": 256,
    "leg_steps": LEG_STEPS,
    "heap": HEAP,
}
TOY = {**SETTINGS, "sync_every": 6, "layers": 2, "width": 32}


def measure(results: Results, settings: Mapping[str, Any], rounds: int, timeout_s: float) -> None:
    """Measure the rounds that `results` lacks: all rows of one in the same processes, in turn.

    Raises:
        LaboratoryUnavailable: where this machine cannot make the laboratory.
        RanksFailed: a rank failed.
    """
    for round_ in range(rounds):
        if all(results.has(RATE, row, round_) for row in LABELS):
            continue
        first = round_ % len(LABELS)
        rows = [*list(LABELS)[first:], *list(LABELS)[:first]]
        with NetLab(NODES, RATE) as lab:
            ranks = run_in_lab(lab, "linked", {**settings, "rows": rows}, timeout_s, HEAP)
        for row in rows:
            results.add(RATE, round_, by_node([rank[row] for rank in ranks], settings["ranks"]))
        print(f"round {round_} at {RATE}", flush=True)


def by_node(windows: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the windows of nodes of so many ranks each.

    A step takes a node as long as its slowest rank. Its ranks read the same interface, and each has
    a ledger of its own.
    """
    nodes = []
    for first in range(0, len(windows), ranks):
        mine = windows[first : first + ranks]
        step_s = [max(one) for one in zip(*(w["step_s"] for w in mine), strict=True)]
        nodes.append(
            {
                **mine[0],
                "step_s": step_s,
                "seconds": sum(step_s),
                "own_s": [min(one) for one in zip(*(w["own_s"] for w in mine), strict=True)],
                "ledger_bytes": sum(w["ledger_bytes"] for w in mine),
                "waited_s": max(w["waited_s"] for w in mine),
                "beside_s": sum(w["beside_s"] for w in mine),
            }
        )
    return nodes


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Figures]:
    """Return the medians over the rounds, by row."""
    found = figures_by_row(records, RATE, LABELS)
    assert all(isinstance(one, Figures) for one in found.values()), "a failed round is not kept"
    return {row: one for row, one in found.items() if isinstance(one, Figures)}


def opening(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was found, for the top of the page."""
    found = figures(records)
    told = []
    for layout in LAYOUTS:
        slower, _ = compared(found[layout], found[f"{layout}_{ALONE}"])
        told.append(f"{slower:.3f} ({found[layout].ledger_bytes or 0:,.0f} bytes) with {layout}")
    return [
        f"- **Found, link:** over {RATE} between two nodes of two ranks each, a step with syncs"
        " takes so many times as long as without, and so many bytes of a node:"
        f" {', '.join(told)} inside.",
    ]


def targets(found: Mapping[str, Figures]) -> list[str]:
    """Return the targets, with what was measured."""
    lines = ["| target | figure | |", "|---|---|---|"]
    for layout in LAYOUTS:
        ours, alone = found[layout], found[f"{layout}_{ALONE}"]
        ratio, rounds = compared(ours, alone)
        text = f"{layout}: step time / no syncs, at most {1 + SLOWER}"
        lines.append(target(text, ratio, ratio <= 1 + SLOWER))
        reach = ", ".join(f"{one:.3f}" for one in rounds)
        lines.append(f"| the same, by round | {reach} | |")
        by_step = compared_step_by_step(ours, alone)
        if by_step is not None:
            met = by_step[0] <= 1 + SLOWER
            lines.append(target("the same, step by step", by_step[0], met))
        agreement = ours.wire_bytes / (ours.ledger_bytes or 1)
        text = f"{layout}: interface / ledger, within {100 * AGREE:.0f} %"
        lines.append(target(text, agreement, abs(agreement - 1) <= AGREE))
    for layout in (FSDP, DOMINO):
        alike = (found[layout].ledger_bytes or 0) / (found[DDP].ledger_bytes or 1)
        text = f"{layout}'s bytes / ddp's, ledger, within {100 * ALIKE:.0f} %"
        lines.append(target(text, alike, abs(alike - 1) <= ALIKE))
    return lines


def page_lines(records: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Return the part of the page below its title."""
    found = figures(records)
    parameters = records[0]["nodes"][0]["parameters"]
    return [
        *targets(found),
        "",
        *table(dict(found), LABELS),
        "",
        _how_it_was_measured(settings),
        "",
        *_inside(4 * parameters, settings["ranks"]),
    ]


def _inside(num_bytes: int, ranks: int) -> list[str]:
    """Return what a rank sends within its replica at every step, by formula."""
    share = num_bytes * (ranks - 1) / ranks
    return [
        "Within a replica, by FSDP2's formula, as `group_ledger` has it: a unit of b bytes, divided"
        " among k ranks, is gathered for its forward and for its backward, and its gradients are"
        " reduce-scattered, b (k - 1) / k bytes a rank each time. Together a step sends"
        f" {3 * share / 1e6:.1f} MB a rank, and DDP's all-reduce {2 * share / 1e6:.1f} MB.",
    ]


def _how_it_was_measured(settings: Mapping[str, Any]) -> str:
    ranks, sync_every, legs = (settings[key] for key in ("ranks", "sync_every", "leg_steps"))
    layers, width = settings["layers"], settings["width"]
    return f"""\
Two nodes of the network laboratory, {ranks} ranks each, which are one replica. The link
between nodes is shaped to {RATE}; ranks of a node reach each other over loopback. GPT-2 of
{layers} blocks, {width} wide, {VOCABULARY} words, batch {BATCH} x {TOKENS} a rank, AdamW, fp32
inside, fp4 between, `sync_every={sync_every}` (the default is 100: syncs weigh more here), all else
by default. Domino's ranks have the same batch, `split="none"`.
*No syncs*: the same strategy, whose first sync lies behind the end. All rows of a round
run in the same processes, {legs} steps of one and then of the next, as in
[bandwidth](../bandwidth/result.md), which says what the columns are; a window is one cycle. A
node's step is that of its slowest rank, its bytes those of all its ranks. No row has utilization 1.

One thread a rank. Four ranks share the cores that are named above: where these are two, a step
takes twice as long as on a machine with a core for each, and twice as much communication hides
behind it; and who waits for the link leaves the core to another rank. The step times are of this
machine alone, and the ratios a lower bound of what links of {RATE} cost faster nodes."""
