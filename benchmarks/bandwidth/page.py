"""The result page of `benchmarks.bandwidth`, from its raw results alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.chain import chain, compared, compared_step_by_step, noise
from benchmarks.bandwidth.figures import FEWEST_ROUNDS, LABELS, Figures, figures_by_row
from benchmarks.common.page import draw_bars
from benchmarks.lab import BURST_KIB

TITLE = "How long does a step take over slow links, and what does it send?"
HEADLINE_RATE = "100mbit"
DRAWN = {
    "none": "no communication",
    "ddp": "DDP",
    "ddp_powersgd": "DDP, PowerSGD",
    "torchft_delay": "torchft DiLoCo, delay",
    "overlap": "Streaming DiLoCo, fp32",
    "overlap_fp4": "Streaming DiLoCo, fp4",
}


def opening(raw: Mapping[str, Any], picture: str) -> list[str]:
    """Return what was asked and what was found, for the top of the page."""
    lines = [
        "Two machines train one GPT-2 of 5.8 million parameters, joined by a slow link. Data"
        " parallelism sends all gradients at every step; Streaming DiLoCo sends a few bytes now and"
        " then, while it computes.",
        "",
    ]
    found = figures_by_row(raw["records"], HEADLINE_RATE)
    none, ddp, ours = (found.get(row) for row in ("none", "ddp", "overlap_fp4"))
    if isinstance(none, Figures) and isinstance(ddp, Figures) and isinstance(ours, Figures):
        (slower, _), (faster, _) = compared(ours, none), compared(ddp, ours)
        fewer = ddp.wire_bytes / ours.wire_bytes
        lines += [
            f"**Found, at {HEADLINE_RATE}:** a step of Streaming DiLoCo with all it has (overlap,"
            f" fp4) takes {slower:.2f} times as long as without any communication. DDP's takes"
            f" {faster:.1f} times as long as that, and sends {fewer:,.0f} times the bytes.",
        ]
    else:
        lines += [f"**Found:** nothing yet; no communication, DDP and fp4 at {HEADLINE_RATE} lack."]
    return [*lines, "", f"![milliseconds a step, by link and way to train]({picture})"]


def draw(records: Sequence[dict[str, Any]], rates: Sequence[str], path: Path) -> None:
    """Write a PNG with the step times of the rows that most readers ask for."""
    by_rate = {rate: figures_by_row(records, rate) for rate in rates}
    draw_steps(path, "A step over slow links, and without any", by_rate, DRAWN)


def draw_steps(
    path: Path,
    title: str,
    by_rate: Mapping[str, Mapping[str, Figures | str]],
    names: Mapping[str, str],
) -> None:
    """Write a PNG with the step times of the rows that have names, rate by rate."""
    groups = {
        rate: {
            name: figures.step_ms
            for row, name in names.items()
            if isinstance(figures := found.get(row), Figures)
        }
        for rate, found in by_rate.items()
    }
    draw_bars(path, title, "ms a step", groups, logarithmic=True)


def table(found: dict[str, Figures | str], labels: Mapping[str, str] = LABELS) -> list[str]:
    """Return the table of one rate as lines of Markdown; `none` gives the utilization.

    Times that no row has are left out.
    """
    more: dict[str, Callable[[Figures], float | None]] = {
        "step by step": Figures.step_by_step_ms,
        "waited": lambda figures: figures.waited_ms,
        "own": Figures.own_ms,
        "beside": lambda figures: figures.beside_ms,
    }
    measured = [figures for figures in found.values() if isinstance(figures, Figures)]
    times: dict[str, Callable[[Figures], float | None]] = {
        "ms a step": lambda figures: figures.step_ms
    }
    times |= {
        k: ms for k, ms in more.items() if any(ms(figures) is not None for figures in measured)
    }
    after = ["utilization", "bytes a step, interface", "bytes a step, ledger", "rounds"]
    lines = [f"| | {' | '.join([*times, *after])} |", "|---" * (1 + len(times) + len(after)) + "|"]
    none = found.get("none")
    for row, figures in found.items():
        if isinstance(figures, str):
            empty = " |" * (len(times) + len(after) - 1)
            lines.append(f"| {labels[row]} | did not run: {figures} |{empty}")
            continue
        shown = ["-" if (one := ms(figures)) is None else f"{one:.1f}" for ms in times.values()]
        share = f"{100 / compared(figures, none)[0]:.1f} %" if isinstance(none, Figures) else "-"
        ledger = "-" if figures.ledger_bytes is None else f"{figures.ledger_bytes:,.0f}"
        if figures.ledger_bytes is not None and not figures.ledger_is_counted:
            ledger += " (computed)"
        shown += [share, f"{figures.wire_bytes:,.0f}", ledger, str(len(figures.ms_by_round))]
        lines.append(f"| {labels[row]} | {' | '.join(shown)} |")
    return lines


def headline(found: dict[str, Figures | str]) -> list[str]:
    """Return the targets of the last row against no communication and DDP, with the figures."""
    none, ddp, ours = (found.get(row) for row in ("none", "ddp", "overlap_fp4"))
    if not (isinstance(none, Figures) and isinstance(ddp, Figures) and isinstance(ours, Figures)):
        return [f"Not measured: it takes no communication, DDP and fp4 at {HEADLINE_RATE}."]
    lines = ["| target | figure | |", "|---|---|---|"]
    (slower, _), (faster, _) = compared(ours, none), compared(ddp, ours)
    lines.append(target("step time / no communication, at most 1.03", slower, slower <= 1.03))
    by_step = compared_step_by_step(ours, none)
    if by_step is not None:
        lines.append(target("the same, step by step", by_step[0], by_step[0] <= 1.03))
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
    """Return the page below its provenance: verdicts and tables, then the method.

    Args:
        raw: `settings` and `records` of `benchmarks.bandwidth`.
        rates: in the order of the page.
    """
    lines = [f"## Targets at {HEADLINE_RATE}", ""]
    lines += headline(figures_by_row(raw["records"], HEADLINE_RATE))
    for rate in rates:
        found = figures_by_row(raw["records"], rate)
        lines += ["", f"## {rate}", "", *table(found), "", *chain(found), *noise(found)]
        lines += _windows(raw["records"], rate)
    return [
        *lines,
        "",
        "## How it was measured",
        "",
        how_it_was_measured(raw["settings"]),
    ]


def _windows(records: Sequence[dict[str, Any]], rate: str) -> list[str]:
    """Return how long the windows of a rate were, in steps."""
    rows: dict[int, list[str]] = {}
    for row in LABELS:
        of_row = [r["nodes"][0] for r in records if r["rate"] == rate and r["row"] == row]
        for steps in {node["steps"] for node in of_row if not node["error"]}:
            rows.setdefault(steps, []).append(LABELS[row])
    return [f"- A window of {steps} steps: {', '.join(names)}." for steps, names in rows.items()]


def how_it_was_measured(settings: Mapping[str, Any]) -> str:
    """Return what all figures of the page have in common.

    Args:
        settings: with which they were measured.
    """
    heap = " ".join(f"{name}={value}" for name, value in settings["heap"].items())
    return f"""\
Two nodes of the network laboratory (`benchmarks/lab/netlab.py`), every link shaped to the rate,
delay not shaped; after a pause the first {BURST_KIB} KiB pass unshaped. GPT-2 with 5.8 million
parameters, random tokens, batch 4 x 128 a rank, one thread a rank, AdamW,
H={settings["sync_every"]}.

In a round every row runs once, in the same pair of processes: one `Trainer.fit` per row, which take
turns. After {settings["leg_steps"]} steps of one, and more while it has a fragment in flight, all
stand still but the next, in the order of the table, until every window is full: what slows the
machine for seconds meets every row that has steps left. Between two turns lies a barrier, whose 500
bytes or so are counted and whose time is nobody's: both nodes begin a turn at one moment, and a
sync, which falls on the first step of a turn or into the next ones, waits for the slower node's
part of these steps and not of all since the last sync. The first step of a turn takes some per cent
longer than the others, in every row.

All fits of a process share one heap, which keeps what is freed below 32 MiB
(`{heap}`). glibc's own rule is to keep twice
as much as the largest block that came back. Rows would then differ by the sizes of their blocks:
DiLoCo, which frees an outer gradient of the whole model, would keep its heap, and no communication
would fetch part of it anew in every step.

PowerSGD runs in processes of its own and shares its time with nobody: its hook's all-reduces may
come in another order on each node, on which gloo aborts, and the rows beside it would be lost. So
does torchft, which is no Lightning strategy, in a loop of its own, in the first round only. Where
several calls are named above, a ratio of two rows is of the rounds in which one call measured both.

- ms a step: the median over the rounds of a window's mean step, of the slower node. What computes
  the same may still differ from fit to fit, by where its memory lies.
- step by step: of every step of the window the median over the rounds, and of these the mean, so
  that what stops the machine for seconds, elsewhere in every round, falls out, and what a step
  costs in every round stays; what a node waits for one that was stopped falls out too. Where
  {FEWEST_ROUNDS} rounds or more kept their steps, it decides whether a row is slower than the one
  before it.
- waited: milliseconds a step in which a rank stood still for others, as the strategy's ledger has
  it, of the node that waited longer.
- own: how long the strategy itself holds up training, at the end of steps, waiting for the link
  included, of the node that took less (the other one had come first, and waited for it). By own
  time and step by step alike, a verdict that turns with a round left out is none.
- beside: CPU time a step of all threads but the training's, gloo's among them, of the node with
  more of it. Where every core trains, as here, it is taken from the training. The threads of rows
  that stand still poll their sockets: that is in every row's figure and step time, also in those of
  no communication, so that a strategy's own share of it is in no ratio here: 0.6 ms a step where
  rows ran one after the other (this page at commit 8f435dd).
- utilization: the step time of no communication over the row's. No communication: a plain Trainer a
  node, both at once.
- bytes: the median over nodes and rounds of what one node sent.

The window of a DiLoCo row is {settings["cycles"]} whole cycle(s) in the steady state. A fit is
silent for its first H steps; for the timing its step counter starts a few steps before H, so that
the window begins with the first launch. Ahead of it every fragment is exchanged once, as DDP's
gradients are in the warm-up, and what is exchanged at the end of a fit lies outside. Lightning
broadcasts a flag before every batch, which is part of DDP's rows; it ignores `ddp_comm_hook` on the
CPU, so a subclass registers the hook."""
