"""The result page of `benchmarks.lion_bandwidth`, from its raw results alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.figures import Figures, figures_by_row
from benchmarks.bandwidth.page import HEADLINE_RATE, draw_steps, table, target
from benchmarks.bandwidth.window import LEG_STEPS
from benchmarks.lab import BURST_KIB

TITLE = "How long does a step of Distributed Lion take over slow links, and what does it send?"
LABELS = {
    "none": "no communication, AdamW",
    "ddp": "DDP, AdamW",
    "ddp_powersgd": "DDP, AdamW, PowerSGD rank 4",
    "lion_none": "no communication, Lion",
    "lion": "Distributed Lion, majority, overlap",
    "lion_no_overlap": "the same without overlap",
    "lion_random": "Distributed Lion, random ties, overlap",
    "lion_average": "Distributed Lion, average, overlap",
    "lion_zeros": "Distributed Lion, majority, overlap, exact zeros",
}
DRAWN = {
    "none": "no communication",
    "ddp": "DDP",
    "ddp_powersgd": "DDP, PowerSGD",
    "lion": "Distributed Lion",
}
MODES = {"lion": "majority", "lion_random": "majority, random ties", "lion_average": "average"}
WITHIN = 0.05  # of the formula, at the interface

HOW_IT_WAS_MEASURED = f"""\
Nodes of the network laboratory (`benchmarks/lab/netlab.py`), every link shaped to the rate, delay
not shaped; after a pause, and so at every step, the first {BURST_KIB} KiB pass unshaped. GPT-2 with
5.8 million parameters, random tokens, batch 4 x 128 a rank, one thread a rank; bytes follow from
shapes and signs, not from what is learned. In a round every row runs once, in the same processes:
one `Trainer.fit` per row, which take turns of {LEG_STEPS} steps, with a barrier of 500 bytes or so
between; what the threads of rows that stand still poll is in every row's time. Who begins changes
with the round, and random ties, average and exact zeros, there for their bytes, run in the first
round only. A figure is the median over the rounds of a window's mean step, of the slowest node;
step by step: of every step of the window the median over the rounds, and of these the mean, which
leaves out what stops the machine for seconds; bytes are the median over nodes and rounds of what
one node sent. No communication: a plain Trainer a node, all at once; with Lion it is
`DistributedLion` alone. Utilization: the step time of no communication with AdamW over the row's.
Waited: milliseconds a step in which a rank stood still for others, as the strategy's ledger has it,
of the node that waited longest. Lightning broadcasts a flag before every batch, which is part of
DDP's rows; it ignores `ddp_comm_hook` on the CPU, so a subclass registers the hook. PowerSGD runs
in processes of its own: its hook's all-reduces may come in another order on each node, on which
gloo aborts, and the rows beside it would be lost."""

ZEROS = """\
Formula: `Voting.bytes_per_step`, which knows neither headers of TCP and IP nor exact zeros. Every
position of the model has a target here, so that nearly no gradient is exactly zero. transformers'
own loss leaves the last one without: the gradient of its embedding is exactly zero at every step,
and the places of these zeros travel too. That is the row with exact zeros."""


def opening(records: Sequence[dict[str, Any]], rates: Sequence[str], picture: str) -> list[str]:
    """Return what was asked and what was found, for the top of the page."""
    lines = [
        "Machines train one GPT-2 of 5.8 million parameters, joined by slow links. Data parallelism"
        " sends 32 bits of gradient per parameter; Distributed Lion sends one bit up, a vote, and"
        " one bit down, while it computes.",
        "",
    ]
    for rate in rates:
        found = figures_by_row(of_nodes(records, 2), rate, LABELS)
        none, ddp, ours = (found.get(row) for row in ("lion_none", "ddp", "lion"))
        if isinstance(none, Figures) and isinstance(ddp, Figures) and isinstance(ours, Figures):
            lines.append(
                f"- **Found, two nodes at {rate}:** DDP's step takes"
                f" {ddp.step_ms / ours.step_ms:.2f} times as long as a vote's, which takes"
                f" {ours.step_ms / none.step_ms:.2f} times as long as Lion's without any"
                " communication."
            )
    return [*lines, "", f"![milliseconds a step, by link and way to train]({picture})"]


def draw(records: Sequence[dict[str, Any]], rates: Sequence[str], path: Path) -> None:
    """Write a PNG with the step times on two nodes."""
    by_rate = {rate: figures_by_row(of_nodes(records, 2), rate, LABELS) for rate in rates}
    draw_steps(path, "A step on two nodes", by_rate, DRAWN)


def of_nodes(records: Sequence[dict[str, Any]], nodes: int) -> list[dict[str, Any]]:
    """Return the records that so many nodes measured."""
    return [r for r in records if len(r["nodes"]) == nodes]


def headline(found: dict[str, Figures | str]) -> list[str]:
    """Return the targets of two nodes at `HEADLINE_RATE`, with the figures."""
    names = ("ddp", "ddp_powersgd", "lion_none", "lion")
    ddp, powersgd, none, ours = (found.get(name) for name in names)
    lines = ["| target | figure | |", "|---|---|---|"]
    if not isinstance(ours, Figures):
        return [f"Not measured: it takes Distributed Lion at {HEADLINE_RATE} on two nodes."]
    if isinstance(ddp, Figures):
        faster = ddp.step_ms / ours.step_ms
        lines.append(target("DDP's step time / step time, at least 4.5", faster, faster >= 4.5))
    if isinstance(powersgd, Figures):
        faster = powersgd.step_ms / ours.step_ms
        lines.append(target("PowerSGD's step time / step time, above 1", faster, faster > 1))
    if isinstance(none, Figures):
        slower = ours.step_ms / none.step_ms
        text = "step time / no communication (Lion), at most 1.15"
        lines.append(target(text, slower, slower <= 1.15))
    return lines


def who_wins(
    records: Sequence[dict[str, Any]], rates: Sequence[str], node_counts: Sequence[int]
) -> list[str]:
    """Return Distributed Lion against DDP with AdamW, in every figures of rates and nodes."""
    lines = ["| rate | nodes | DDP, ms | Distributed Lion, ms | DDP / Lion | faster |"]
    lines.append("|---|---|---|---|---|---|")
    for rate in rates:
        for nodes in node_counts:
            found = figures_by_row(of_nodes(records, nodes), rate, LABELS)
            ddp, ours = found.get("ddp"), found.get("lion")
            if not (isinstance(ddp, Figures) and isinstance(ours, Figures)):
                lines.append(f"| {rate} | {nodes} | | | | not measured |")
                continue
            ratio = ddp.step_ms / ours.step_ms
            winner = "Distributed Lion" if ratio > 1 else "plain DDP"
            lines.append(
                f"| {rate} | {nodes} | {ddp.step_ms:.1f} | {ours.step_ms:.1f} | {ratio:.2f}"
                f" | {winner} |"
            )
    return lines


def bytes_by_mode(records: Sequence[dict[str, Any]], node_counts: Sequence[int]) -> list[str]:
    """Return the bytes at the interface against the formula, over all rates and rounds."""
    lines = ["| nodes | mode | interface | ledger | formula | interface / formula | within 5 % |"]
    lines.append("|---|---|---|---|---|---|---|")
    for nodes in node_counts:
        for row, mode in MODES.items():
            windows = [
                window
                for record in of_nodes(records, nodes)
                if record["row"] == row
                for window in record["nodes"]
                if not window["error"]
            ]
            if not windows:
                continue
            wire, ledger, formula = (
                statistics.median(window[name] / window["steps"] for window in windows)
                for name in ("wire_bytes", "ledger_bytes", "formula_bytes")
            )
            ratio = wire / formula
            lines.append(
                f"| {nodes} | {mode} | {wire:,.0f} | {ledger:,.0f} | {formula:,.0f} | {ratio:.4f}"
                f" | {'met' if abs(ratio - 1) <= WITHIN else 'missed'} |"
            )
    return lines


def page_lines(
    raw: dict[str, Any], rates: Sequence[str], node_counts: Sequence[int], cores: int
) -> list[str]:
    """Return the page below its provenance.

    Args:
        raw: `settings` and `records` of `benchmarks.lion_bandwidth`.
        rates: in the order of the page.
        node_counts: in the order of the page.
        cores: of the machine that measured.
    """
    records, steps = raw["records"], raw["settings"]["steps"]
    lines = [f"## Targets at {HEADLINE_RATE}, two nodes", ""]
    lines += headline(figures_by_row(of_nodes(records, 2), HEADLINE_RATE, LABELS))
    lines += ["", "## Where DDP wins", "", *who_wins(records, rates, node_counts)]
    lines += ["", "## Bytes a node sends in a step, by mode", ""]
    lines += [*bytes_by_mode(records, node_counts), ""]
    lines.append(ZEROS)
    for nodes in node_counts:
        for rate in rates:
            found = figures_by_row(of_nodes(records, nodes), rate, LABELS)
            lines += ["", f"## {nodes} nodes, {rate}", ""]
            if nodes > cores:
                lines += [_contention(nodes, cores), ""]
            lines += table(found, LABELS)
    window = f"The window is {steps} steps, of DDP's rows fewer on a slow link."
    return [*lines, "", "## How it was measured", "", HOW_IT_WAS_MEASURED, "", window]


def _contention(nodes: int, cores: int) -> str:
    return (
        f"{nodes} nodes share {cores} cores: every row's computing takes about {nodes / cores:g}"
        " times as long as on a machine a node, so less of a step is waiting, and rows that compute"
        " on what they send pay twice. Compare rows within this table only."
    )
