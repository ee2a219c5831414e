"""Result page of `benchmarks.lion_bandwidth`, made from its raw results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.figures import Figures, figures_by_row
from benchmarks.bandwidth.page import HEADLINE_RATE, draw_steps, table, target
from benchmarks.bandwidth.window import LEG_STEPS
from benchmarks.lab import BURST_KIB

TITLE = "How long does a step of Distributed Lion take over slow links, and how much does it send?"
LABELS = {
    "none": "no communication, AdamW",
    "ddp": "DDP, AdamW",
    "ddp_powersgd": "DDP, AdamW, PowerSGD rank 4",
    "lion_none": "no communication, Lion",
    "lion": "Distributed Lion, majority, overlap",
    "lion_no_overlap": "Distributed Lion, majority, no overlap",
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
WITHIN = 0.05  # relative difference of interface and formula

HOW_IT_WAS_MEASURED = f"""\
Nodes of the network laboratory (`benchmarks/lab/netlab.py`). Every link is shaped to the rate; the
delay is not shaped, and after a pause, and so at every step, {BURST_KIB} KiB pass unshaped. GPT-2
with 5.8 million parameters, random tokens, batch 4 x 128 per rank, one thread per rank. Bytes
depend on shapes and signs, not on what is learned. In a round every row runs once, in the same
processes: one `Trainer.fit` per row, which take turns of {LEG_STEPS} steps with a barrier of about
500 bytes in between; the polling of paused rows' threads is part of every row's time. The first row
changes with the round. Random ties, average and exact zeros only show bytes and run in the first
round only. A figure is the median over the rounds of the mean step of a window, of the slowest
node. Step by step: for every step of the window the median over the rounds, then the mean over the
steps, which removes interruptions of the machine. Bytes are the median over nodes and rounds of the
bytes that one node sent. No communication: a plain Trainer per node, all at the same time; with
Lion, `DistributedLion` alone. Baseline: AdamW without communication, of the rounds that the row
shared with it. Utilization: the baseline over the row's step time, for 3 rounds or more. Waited:
milliseconds per step in which a rank waited for others, from the strategy's ledger, of the node
that waited longest. Lightning broadcasts a flag before every batch, which is part of DDP's rows; it
ignores `ddp_comm_hook` on the CPU, so a subclass registers the hook. PowerSGD runs in separate
processes, where it takes turns with a baseline of its own: its hook may start all-reduces in a
different order on each node, on which gloo aborts, and all rows of the process would be lost."""

ZEROS = """\
Formula: `Voting.bytes_per_step`, which includes neither headers of TCP and IP nor exact zeros.
Every position of the model has a target here, so that hardly any gradient is exactly zero. With
transformers' own loss the last position has no target: the gradient of its embedding is exactly
zero at every step, and the positions of these zeros are sent as well. This is the row with exact
zeros."""


def opening(records: Sequence[dict[str, Any]], rates: Sequence[str], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        "Machines, connected by slow links, train a GPT-2 with 5.8 million parameters. Data"
        " parallelism sends 32 bits of gradient per parameter; Distributed Lion sends one bit up as"
        " a vote, and one bit down, while it computes.",
        "",
    ]
    for rate in rates:
        found = figures_by_row(of_nodes(records, 2), rate, LABELS)
        none, ddp, ours = (found.get(row) for row in ("lion_none", "ddp", "lion"))
        if isinstance(none, Figures) and isinstance(ddp, Figures) and isinstance(ours, Figures):
            lines.append(
                f"- **Found, two nodes at {rate}:** a step of DDP takes"
                f" {ddp.step_ms / ours.step_ms:.2f} times as long as a step of Distributed Lion,"
                f" which takes {ours.step_ms / none.step_ms:.2f} times as long as a step of Lion"
                " without communication."
            )
    loss = (
        "The loss of two, four and eight workers is on the page of [Lion's"
        " losses](../lion_quality/result.md), of smaller models."
    )
    return [*lines, "", loss, "", f"![milliseconds per step, by link and method]({picture})"]


def draw(records: Sequence[dict[str, Any]], rates: Sequence[str], path: Path) -> None:
    """Draw the step times on two nodes as a PNG."""
    by_rate = {rate: figures_by_row(of_nodes(records, 2), rate, LABELS) for rate in rates}
    draw_steps(path, "A step on two nodes", by_rate, DRAWN)


def of_nodes(records: Sequence[dict[str, Any]], nodes: int) -> list[dict[str, Any]]:
    """Return the records measured on this number of nodes."""
    return [r for r in records if len(r["nodes"]) == nodes]


def headline(found: dict[str, Figures | str]) -> list[str]:
    """Return the targets for two nodes at `HEADLINE_RATE`, with the measured figures."""
    names = ("ddp", "ddp_powersgd", "lion_none", "lion")
    ddp, powersgd, none, ours = (found.get(name) for name in names)
    lines = ["| target | figure | |", "|---|---|---|"]
    if not isinstance(ours, Figures):
        return [f"Not measured: `lion` at {HEADLINE_RATE} on two nodes is missing."]
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


def faster_method(
    records: Sequence[dict[str, Any]], rates: Sequence[str], node_counts: Sequence[int]
) -> list[str]:
    """Return the table that compares Distributed Lion with DDP by rate and number of nodes."""
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
    """Return the table of bytes at the interface and by the formula, over all rates and rounds."""
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
    """Return the page below the provenance; `cores` are those of the measuring machine."""
    records, steps = raw["records"], raw["settings"]["steps"]
    lines = [f"## Targets at {HEADLINE_RATE}, two nodes", ""]
    lines += headline(figures_by_row(of_nodes(records, 2), HEADLINE_RATE, LABELS))
    lines += ["", "## Where DDP is faster", "", *faster_method(records, rates, node_counts)]
    lines += ["", "## Bytes per step and node, by mode", ""]
    lines += [*bytes_by_mode(records, node_counts), ""]
    lines.append(ZEROS)
    for nodes in node_counts:
        for rate in rates:
            found = figures_by_row(of_nodes(records, nodes), rate, LABELS)
            lines += ["", f"## {nodes} nodes, {rate}", ""]
            if nodes > cores:
                lines += [_contention(nodes, cores), ""]
            lines += table(found, LABELS)
    window = f"The window is {steps} steps, and fewer for the rows of DDP on a slow link."
    return [*lines, "", "## How it was measured", "", HOW_IT_WAS_MEASURED, "", window]


def _contention(nodes: int, cores: int) -> str:
    return (
        f"{nodes} nodes share {cores} cores: the computation of every row takes about"
        f" {nodes / cores:g} times as long as with a machine per node. Less of a step is therefore"
        " waiting, and rows that compute on what they send pay twice. Compare rows within this"
        " table only."
    )
