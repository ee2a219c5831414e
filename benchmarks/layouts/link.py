"""Part `link`: two replicas of two ranks over a slow link, with and without syncs.

The first half runs in the ranks, the second half starts them and writes the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.bandwidth.figures import Figures, compare, compare_step_by_step, figures_by_row
from benchmarks.bandwidth.job import BATCH, TOKENS, VOCABULARY
from benchmarks.bandwidth.measure import HEAP, NODES, Results
from benchmarks.bandwidth.page import table, target
from benchmarks.bandwidth.window import LEG_STEPS, WARM_UP, Stopwatch, Window
from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from benchmarks.common.relay import Relay, Run
from benchmarks.lab import NetLab
from benchmarks.layouts.memory import DDP, FSDP
from benchmarks.layouts.ranks import run_in_lab
from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.domino import DominoSettings

ALONE, DOMINO = "alone", "domino"
NEVER = 10_000  # steps: longer than the fit, so no fragment leaves


def inside_of(row: str) -> Any:
    """Return the strategy's `inside` of a row."""
    layout = row.split("_")[0]
    return DominoSettings(split="none") if layout == DOMINO else layout


def measure_row(row: str, plan: dict[str, Any], pass_on: Any) -> Window:
    """Run one fit of two replicas, one per node; those of an "alone" row never sync."""
    ranks, sync_every = plan["ranks"], plan["sync_every"]
    stopwatch = Stopwatch(row, sync_every, sync_every, pass_on)
    strategy = StreamingDiLoCoStrategy(
        sync_every=NEVER if row.endswith(ALONE) else sync_every,
        replica_size=ranks,
        inside=inside_of(row),
    )
    module = Module(gpt2(VOCABULARY, TOKENS, plan["layers"], plan["width"]))
    dist.barrier()
    nodes = dist.get_world_size() // ranks
    trainer = quiet_trainer(strategy, nodes, WARM_UP + sync_every + 1, [stopwatch], devices=ranks)
    trainer.fit(module, loader(Tokens(VOCABULARY, TOKENS), BATCH))
    assert stopwatch.window is not None, "the fit has completed the window"
    return stopwatch.window


def _run(row: str, plan: dict[str, Any]) -> Run[Window]:
    return lambda pass_on: measure_row(row, plan, pass_on)


def every_row(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run all rows, taking turns; return this rank's windows by row."""
    del folder
    relay = Relay({row: _run(row, plan) for row in plan["rows"]})
    return {row: asdict(window) for row, window in relay.results()}


RATE = "100mbit"
# allowed differences of the targets' ratios from 1
SLOWER, AGREE, SAME = 0.05, 0.03, 0.01
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
    """Measure the rounds missing from `results`; all rows of a round share the same processes.

    Raises:
        LaboratoryUnavailable: this machine cannot run the laboratory.
        RanksFailed: a rank failed.
    """
    for round_ in range(rounds):
        if all(results.has(RATE, row, round_) for row in LABELS):
            continue
        first = round_ % len(LABELS)
        rows = [*list(LABELS)[first:], *list(LABELS)[:first]]
        with NetLab(NODES, RATE) as lab:
            ranks = run_in_lab(lab, "link", {**settings, "rows": rows}, timeout_s, HEAP)
        for row in rows:
            results.add(RATE, round_, by_node([rank[row] for rank in ranks], settings["ranks"]))
        print(f"round {round_} at {RATE}", flush=True)


def by_node(windows: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Combine the windows of ranks into windows of nodes.

    A step of a node takes as long as that of its slowest rank. The ranks of a node read the same
    interface, and each has its own ledger.
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
    """Return the medians over rounds by row."""
    found = figures_by_row(records, RATE, LABELS)
    assert all(isinstance(one, Figures) for one in found.values()), "failed rounds are not recorded"
    return {row: one for row, one in found.items() if isinstance(one, Figures)}


def opening(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the finding, for the top of the page."""
    found = figures(records)
    told = []
    for layout in LAYOUTS:
        slower, _ = compare(found[layout], found[f"{layout}_{ALONE}"])
        told.append(f"{slower:.3f} ({found[layout].ledger_bytes or 0:,.0f} bytes) with {layout}")
    return [
        f"- **Found, link:** over {RATE} between two nodes of two ranks each, step time with syncs"
        f" over step time without (and bytes per step and node): {', '.join(told)} inside.",
    ]


def targets(found: Mapping[str, Figures]) -> list[str]:
    """Return the targets with the measured figures."""
    lines = ["| target | figure | |", "|---|---|---|"]
    for layout in LAYOUTS:
        ours, alone = found[layout], found[f"{layout}_{ALONE}"]
        ratio, rounds = compare(ours, alone)
        text = f"{layout}: step time / no syncs, at most {1 + SLOWER}"
        lines.append(target(text, ratio, ratio <= 1 + SLOWER))
        reach = ", ".join(f"{one:.3f}" for one in rounds)
        lines.append(f"| the same, by round | {reach} | |")
        by_step = compare_step_by_step(ours, alone)
        if by_step is not None:
            met = by_step[0] <= 1 + SLOWER
            lines.append(target("the same, step by step", by_step[0], met))
        agreement = ours.wire_bytes / (ours.ledger_bytes or 1)
        text = f"{layout}: interface / ledger, within {100 * AGREE:.0f} %"
        lines.append(target(text, agreement, abs(agreement - 1) <= AGREE))
    for layout in (FSDP, DOMINO):
        ratio = (found[layout].ledger_bytes or 0) / (found[DDP].ledger_bytes or 1)
        text = f"{layout}: ledger bytes / ddp's, within {100 * SAME:.0f} %"
        lines.append(target(text, ratio, abs(ratio - 1) <= SAME))
    return lines


def page_lines(records: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Return this part of the page."""
    found = figures(records)
    parameters = records[0]["nodes"][0]["parameters"]
    return [
        *targets(found),
        "",
        *table(dict(found), LABELS),
        "",
        _how_it_was_measured(settings),
        "",
        *_bytes_within(4 * parameters, settings["ranks"]),
    ]


def _bytes_within(num_bytes: int, ranks: int) -> list[str]:
    """Return the formula of the bytes that a rank sends within its replica."""
    share = num_bytes * (ranks - 1) / ranks
    return [
        "Within a replica, by the formula of FSDP2, which `group_ledger` also counts: a unit of b"
        " bytes, sharded over k ranks, is gathered for its forward and for its backward, and its"
        " gradients are reduce-scattered, each with b (k - 1) / k bytes per rank. A step sends"
        f" {3 * share / 1e6:.1f} MB per rank in total, and {2 * share / 1e6:.1f} MB with DDP's"
        " all-reduce.",
    ]


def _how_it_was_measured(settings: Mapping[str, Any]) -> str:
    ranks, sync_every, legs = (settings[key] for key in ("ranks", "sync_every", "leg_steps"))
    layers, width = settings["layers"], settings["width"]
    return f"""\
Two nodes of the network laboratory with {ranks} ranks each; a node is one replica. The link between
nodes is shaped to {RATE}; ranks of a node communicate over loopback. GPT-2 with {layers} blocks of
width {width}, a vocabulary of {VOCABULARY}, batch {BATCH} x {TOKENS} per rank, AdamW, fp32 inside,
fp4 between, `sync_every={sync_every}` (the default is 100, so syncs have more weight here), all
else by default. Domino's ranks share one batch, with `split="none"`.
*No syncs*: the same strategy with its first sync after the end of the fit. All rows of a round run
in the same processes, {legs} steps of one and then of the next, as in
[bandwidth](../bandwidth/result.md), which explains the columns; a window is one cycle. A step of a
node is that of its slowest rank, its bytes are those of all its ranks. No row has utilization 1.

One thread per rank. Four ranks share the cores named above. With two cores, a step takes twice as
long as with a core for each rank, so twice as much communication is hidden, and a rank that waits
for the link leaves its core to another rank. The step times hold for this machine only, and the
ratios are a lower bound of the cost of {RATE} links for faster nodes."""
