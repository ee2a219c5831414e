"""Result page of `benchmarks.bandwidth`, made from its raw results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.figures import (
    BASELINES,
    FEWEST_ROUNDS,
    LABELS,
    Figures,
    baseline,
    chain_lines,
    compare,
    compare_step_by_step,
    figures_by_row,
    noise_lines,
)
from benchmarks.bandwidth.job import WORKLOADS
from benchmarks.bandwidth.window import LEG_STEPS
from benchmarks.common.page import draw_bars
from benchmarks.lab import BURST_KIB

TITLE = "How long does a step take over slow links, and how much does it send?"
HEADLINE_RATE = "100mbit"
HEADLINE_RATES = {"5.8M": HEADLINE_RATE, "0.19M": "20mbit"}  # by size of the model
DRAWN = {
    "none": "no communication",
    "ddp": "DDP",
    "ddp_powersgd": "DDP, PowerSGD",
    "torchft_delay": "torchft DiLoCo, delay (own loop)",
    "overlap": "Streaming DiLoCo, fp32",
    "overlap_fp4": "Streaming DiLoCo, fp4",
    "auto": 'Streaming DiLoCo, "auto"',
}


def opening(raw: Mapping[str, Any], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        f"Two machines, connected by a slow link, train a GPT-2 with {raw['settings']['size']}"
        " parameters. Data parallelism sends all gradients at every step; Streaming DiLoCo"
        " occasionally sends a few bytes while it computes.",
        "",
    ]
    loss = (
        "The loss at the same settings (two replicas, H = 100, overlap 5, fp4) is on the page of"
        " [the size ladder](../size_ladder/result.md)."
    )
    rate = HEADLINE_RATES[raw["settings"]["size"]]
    found = figures_by_row(raw["records"], rate)
    none, ddp, ours = (found.get(row) for row in ("none", "ddp", "overlap_fp4"))
    if isinstance(none, Figures) and isinstance(ddp, Figures) and isinstance(ours, Figures):
        (slower, _), (faster, _) = compare(ours, none), compare(ddp, ours)
        fewer = ddp.wire_bytes / ours.wire_bytes
        lines += [
            f"**Found, at {rate}:** a step of Streaming DiLoCo with overlap and fp4 takes"
            f" {slower:.2f} times as long as without any communication. A step of DDP takes"
            f" {faster:.1f} times as long as that, and sends {fewer:,.0f} times the bytes.",
        ]
    else:
        lines += [f"**Found:** nothing yet; a row of the headline at {rate} is missing."]
    return [*lines, "", loss, "", f"![milliseconds per step, by link and method]({picture})"]


def draw(records: Sequence[dict[str, Any]], rates: Sequence[str], path: Path) -> None:
    """Draw the step times of the main rows as a PNG."""
    by_rate = {rate: figures_by_row(records, rate) for rate in rates}
    draw_steps(path, "A step over slow links, and without any", by_rate, DRAWN)


def draw_steps(
    path: Path,
    title: str,
    by_rate: Mapping[str, Mapping[str, Figures | str]],
    names: Mapping[str, str],
) -> None:
    """Draw the step times of the rows in `names` as a PNG, grouped by rate."""
    groups = {
        rate: {
            name: figures.step_ms
            for row, name in names.items()
            if isinstance(figures := found.get(row), Figures)
        }
        for rate, found in by_rate.items()
    }
    draw_bars(path, title, "ms per step", groups, logarithmic=True)


def table(found: dict[str, Figures | str], labels: Mapping[str, str] = LABELS) -> list[str]:
    """Return the table of one rate as Markdown lines; utilization is relative to the baseline.

    Columns without any value are left out.
    """
    more: dict[str, Callable[[Figures], float | None]] = {
        "step by step": Figures.step_by_step_ms,
        "waited": lambda figures: figures.waited_ms,
        "own": Figures.own_ms,
        "other threads": lambda figures: figures.beside_ms,
    }
    measured = [figures for row in labels if isinstance(figures := found.get(row), Figures)]
    times: dict[str, Callable[[Figures], float | None]] = {
        "ms per step": lambda figures: figures.step_ms
    }
    times |= {
        k: ms for k, ms in more.items() if any(ms(figures) is not None for figures in measured)
    }
    compared = any(BASELINES.get(row, "none") in found for row in found)
    after = [
        *(["baseline, ms", "utilization"] if compared else []),
        "bytes per step, interface",
        "bytes per step, ledger",
        "rounds",
    ]
    lines = [f"| | {' | '.join([*times, *after])} |", "|---" * (1 + len(times) + len(after)) + "|"]
    for row, figures in ((row, found[row]) for row in labels if row in found):
        if isinstance(figures, str):
            empty = " |" * (len(times) + len(after) - 1)
            lines.append(f"| {labels[row]} | did not run: {figures} |{empty}")
            continue
        shown = ["-" if (one := ms(figures)) is None else f"{one:.1f}" for ms in times.values()]
        if compared:
            alone = baseline(found, row)
            shown += (
                ["too few rounds"] * 2
                if alone is None
                else [f"{alone[0]:.1f}", f"{100 * alone[1]:.1f} %"]
            )
        ledger = "-" if figures.ledger_bytes is None else f"{figures.ledger_bytes:,.0f}"
        if figures.ledger_bytes is not None and not figures.ledger_is_counted:
            ledger += " (computed)"
        shown += [f"{figures.wire_bytes:,.0f}", ledger, str(len(figures.ms_by_round))]
        lines.append(f"| {labels[row]} | {' | '.join(shown)} |")
    return lines


def headline(found: dict[str, Figures | str]) -> list[str]:
    """Return the targets for Streaming DiLoCo with fp4, with the measured figures."""
    none, ddp, ours = (found.get(row) for row in ("none", "ddp", "overlap_fp4"))
    if not (isinstance(none, Figures) and isinstance(ddp, Figures) and isinstance(ours, Figures)):
        return ["Not measured: `none`, `ddp` or `overlap_fp4` is missing."]
    lines = ["| target | figure | |", "|---|---|---|"]
    (slower, _), (faster, _) = compare(ours, none), compare(ddp, ours)
    lines.append(target("step time / no communication, at most 1.03", slower, slower <= 1.03))
    by_step = compare_step_by_step(ours, none)
    if by_step is not None:
        lines.append(target("the same, step by step", by_step[0], by_step[0] <= 1.03))
    lines.append(target("DDP's step time / step time, at least 5", faster, faster >= 5))
    fewer = ddp.wire_bytes / ours.wire_bytes
    lines.append(target("DDP's interface bytes / ours, at least 500", fewer, fewer >= 500))
    assert ours.ledger_bytes is not None, "our strategies have a ledger"
    agreement = ours.wire_bytes / ours.ledger_bytes
    within = abs(agreement - 1) <= 0.03
    lines.append(target("interface / ledger, within 3 %", agreement, within))
    auto = found.get("auto")
    if isinstance(auto, Figures):
        (ratio, _) = compare(auto, ours)
        text = 'step time with `sync_every="auto"` / with H = 100, at most 1.02'
        lines.append(target(text, ratio, ratio <= 1.02))
    return lines


def heartbeat_lines(found: dict[str, Figures | str]) -> list[str]:
    """Return why the interface counts more than the ledger, and the ratio without that."""
    none, ours = found.get("none"), found.get("overlap_fp4")
    if not (isinstance(none, Figures) and isinstance(ours, Figures) and ours.ledger_bytes):
        return []
    rest = (ours.wire_bytes - none.wire_bytes) / ours.ledger_bytes
    return [
        "",
        "The interface also counts heartbeats (`lightning_commfree/comm/liveness.py`), which are in"
        " no ledger: those of all fits in the processes, also of paused ones. The row without"
        f" communication shows them, with the barriers: {none.wire_bytes:,.0f} bytes per step."
        f" Without these, interface / ledger is {rest:.4g}.",
    ]


def target(text: str, figure: float, met: bool) -> str:
    """Return a row of a table of targets."""
    return f"| {text} | {figure:.4g} | {'met' if met else 'missed'} |"


def page_lines(raw: dict[str, Any], rates: Sequence[str]) -> list[str]:
    """Return the page below the provenance: verdicts and tables, then the method."""
    headline_rate = HEADLINE_RATES[raw["settings"]["size"]]
    lines = [f"## Targets at {headline_rate}", ""]
    found = figures_by_row(raw["records"], headline_rate)
    lines += [*headline(found), *heartbeat_lines(found)]
    for rate in rates:
        found = figures_by_row(raw["records"], rate)
        lines += ["", f"## {rate}", "", *table(found), "", *chain_lines(found), *noise_lines(found)]
        lines += _windows(raw["records"], rate)
    return [
        *lines,
        "",
        "## How it was measured",
        "",
        how_it_was_measured(raw["settings"]),
    ]


def _windows(records: Sequence[dict[str, Any]], rate: str) -> list[str]:
    """Return the lengths of the windows at one rate, in steps."""
    rows: dict[int, list[str]] = {}
    for row in LABELS:
        of_row = [r["nodes"][0] for r in records if r["rate"] == rate and r["row"] == row]
        for steps in {node["steps"] for node in of_row if not node["error"]}:
            rows.setdefault(steps, []).append(LABELS[row])
    lines = [f"- A window of {steps} steps: {', '.join(names)}." for steps, names in rows.items()]
    return lines + _chosen(records, rate)


def _chosen(records: Sequence[dict[str, Any]], rate: str) -> list[str]:
    """Return what `sync_every="auto"` had chosen by the end of each round's window."""
    found = [r["nodes"][0] for r in records if r["rate"] == rate and r["row"] == "auto"]
    every = sorted({node["sync_every"] for node in found if not node["error"]})
    if not every:
        return []
    return [
        f"- {LABELS['auto']}: every {' or '.join(map(str, every))} steps at the end of a window. It"
        f" nearly always has a fragment in flight, so its turns end {LEG_STEPS} steps after a"
        " launch at the earliest."
    ]


def how_it_was_measured(settings: Mapping[str, Any]) -> str:
    """Return the description of the method."""
    heap = " ".join(f"{name}={value}" for name, value in settings["heap"].items())
    workload = WORKLOADS[settings["size"]]
    return f"""\
Two nodes of the network laboratory (`benchmarks/lab/netlab.py`). Every link is shaped to the rate;
the delay is not shaped, and after a pause {BURST_KIB} KiB pass unshaped. GPT-2 with
{settings["size"]} parameters, random tokens, batch {workload.batch} x {workload.tokens} per rank,
one thread per rank, AdamW, H={settings["sync_every"]}.

In a round every row runs once, all in the same pair of processes: one `Trainer.fit` per row, taking
turns. After {settings["leg_steps"]} steps of one row, and more while it has a fragment in flight,
the next row of the table continues, until every window is full. A slowdown of the machine that
lasts seconds therefore affects every row that has steps left. Between two turns there is a barrier.
Its 500 bytes or so are counted; its time is not. It makes both nodes start a turn together, so that
a sync, which happens in the first step of a turn or in the following ones, waits for the slower
node's part of these steps and not of all steps since the last sync. The first step of a turn takes
a few percent longer than the others, in every row.

All fits of a process share one heap, which keeps freed memory in blocks below 32 MiB
(`{heap}`). By default, glibc
keeps twice the size of the largest block that was freed. Rows would then differ by the sizes of
their blocks: DiLoCo, which frees an outer gradient of the whole model, would keep its heap, while
the row without communication would fetch part of it from the system in every step.

PowerSGD runs in separate processes: its hook may start all-reduces in a different order on each
node, on which gloo aborts, and all rows of the process would be lost. So does torchft, which is not
a Lightning strategy, with its own loop. Each of these rows takes turns with a baseline of its own,
the same loop without communication. If several calls are named above, a ratio of two rows uses the
rounds in which one call measured both.

- ms per step: median over the rounds of the mean step of a window, of the slower node. Fits with
  the same computation may still differ by the placement of their memory.
- step by step: for every step of the window the median over the rounds, then the mean over the
  steps. This removes interruptions of the machine, which hit another step in every round, and the
  waiting for an interrupted node; it keeps costs that occur in every round. If
  {FEWEST_ROUNDS} or more rounds recorded their steps, it decides whether a row is slower than the
  one before it.
- waited: milliseconds per step in which a rank waited for others, from the strategy's ledger, of
  the node that waited longer.
- own: how long the strategy itself blocks training at the end of steps, including waiting for the
  link, of the node that took less (the other node came first and waited for it). For own time as
  for step by step, a verdict that changes if a round is left out counts as undecided.
- other threads: CPU time per step of all threads except the training thread, including gloo's, of
  the node with more of it. If every core trains, as here, this time is taken from the training. The
  threads of paused rows poll their sockets, which is part of every row's figure and step time, also
  without communication. A strategy's own share is therefore in no ratio here: it was 0.6 ms per
  step where rows ran one after the other (this page at commit 8f435dd).
- baseline: the step time without communication, of the rounds in which the row took turns with it:
  a plain Trainer per node, both at the same time; for torchft, a plain loop.
- utilization: the baseline over the row's step time, both of the same rounds; shown for
  {FEWEST_ROUNDS} rounds or more.
- bytes: the median over nodes and rounds of the bytes that one node sent.

The window of a DiLoCo row is {settings["cycles"]} whole cycle(s) in the steady state. A fit sends
nothing in its first H steps; for the timing its step counter starts a few steps before H, so that
the window begins with the first launch. Before it, every fragment is exchanged once, as are DDP's
gradients in the warm-up; the exchange at the end of a fit is outside of the window. Lightning
broadcasts a flag before every batch, which is part of DDP's rows; it ignores `ddp_comm_hook` on the
CPU, so a subclass registers the hook."""
