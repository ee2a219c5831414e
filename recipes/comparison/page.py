"""The page of a comparison: one self-contained HTML file."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_commfree.comm.text import human_bytes, plain
from recipes.comparison.figures import DRAWINGS, color, svg
from recipes.comparison.jobs import Plan
from recipes.comparison.outcome import Measured, Outcome, times
from recipes.comparison.running import failure_text
from recipes.training.summary import share

_TEMPLATE = "page.html.jinja"


ON_TERMINAL = (
    "strategy",
    "validation loss",
    "seconds",
    "exposed",
    "sent in steps",
    "of fp32 DDP's",
)


_HEAD_LETTERS = 10  # width of a column's head in a terminal


class Cell(NamedTuple):
    """A figure of the table, with a remark in small print."""

    text: str
    remark: str = ""


def write_html(outcomes: Sequence[Outcome], plan: Plan, command: str, path: Path) -> None:
    """Write the page.

    Args:
        outcomes: of all jobs; the first is the reference.
        plan: of the comparison.
        command: that reproduces the page.
        path: of the page.
    """
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = environment.get_template(_TEMPLATE).render(
        title=title(outcomes),
        lead=lead(outcomes, plan),
        warnings=warnings(outcomes),
        heads=heads(outcomes, plan),
        rows=[_row(place, outcomes, plan) for place in range(len(outcomes))],
        pictures=_pictures(outcomes),
        methods=methods(outcomes, plan),
        command=command,
        provenances=_provenances(outcomes),
    )
    path.write_text(text)


def title(outcomes: Sequence[Outcome]) -> str:
    """Return the page's title."""
    return f"One job under {', '.join(outcome.job.name for outcome in outcomes)}"


def lead(outcomes: Sequence[Outcome], plan: Plan) -> str:
    """Describe the comparison in a few sentences."""
    runs = [outcome.measured for outcome in outcomes if outcome.measured]
    if not runs:
        return "No job ended well."
    summary, history = runs[0]
    where = (
        "all ranks on one machine, so communication is as fast as its memory"
        if plan.bandwidth is None
        else f"on {plan.nodes} nodes whose links are held to {plan.bandwidth} each way"
    )
    return (
        f"Every job trains the same model for {summary.steps:,} steps of"
        f" {history.tokens_per_step:,} tokens, {summary.tokens:,} tokens in all: {where}."
        " Figures are of one run each."
    )


def warnings(outcomes: Sequence[Outcome]) -> list[str]:
    """Return warnings that affect how to read the table."""
    found = []
    failed = [outcome.job.name for outcome in outcomes if outcome.measured is None]
    if failed:
        found.append(f"Failed: {', '.join(failed)}. The figures are those of the other jobs.")
    lengths = {
        outcome.job.name: (outcome.measured.history.tokens_per_step, outcome.measured.summary.steps)
        for outcome in outcomes
        if outcome.measured
    }
    if len(set(lengths.values())) > 1:
        told = ", ".join(
            f"{name} {steps:,} steps of {size:,}" for name, (size, steps) in lengths.items()
        )
        found.append(f"The jobs did not train on equally many tokens: {told}.")
    return found


def heads(outcomes: Sequence[Outcome], plan: Plan) -> list[str]:
    """Return the heads of the table's columns."""
    columns = ["strategy", "validation loss", f"against {outcomes[0].job.name}", "perplexity"]
    columns += ["seconds", "exposed", "hidden, at least", "sent in steps", "of fp32 DDP's"]
    return [*columns, "a node's interface sent"] if plan.bandwidth else columns


def table(outcomes: Sequence[Outcome], plan: Plan) -> Table:
    """Return the page's table for a terminal, with the columns that fit into 80 characters."""
    names = heads(outcomes, plan)
    shown = [names.index(name) for name in names if name in ON_TERMINAL or "against" in name]
    found = Table(box=SIMPLE_HEAD, padding=0)
    for place, column in enumerate(shown):
        folded = "\n".join(wrap(names[column], _HEAD_LETTERS))
        found.add_column(folded, justify="right" if place else "left", no_wrap=True)
    for outcome in outcomes:
        row = [outcome.job.name]
        if outcome.measured is not None:
            row += [cell.text for cell in cells(outcome, outcomes[0].measured, plan)]
        else:
            row += ["failed", *[""] * len(names)]
        found.add_row(*(Text(row[column]) for column in shown))
    return found


def cells(outcome: Outcome, first: Measured | None, plan: Plan) -> list[Cell]:
    """Return the table cells of a successful run, without its name.

    Args:
        outcome: of the run.
        first: measurements of the reference; None if it failed.
        plan: of the comparison.
    """
    assert outcome.measured is not None, "the job ended well"
    summary, spent = outcome.measured.summary, times(outcome)
    against = "-"
    if first is not None and first is not outcome.measured:
        difference = summary.validation_loss / first.summary.validation_loss - 1
        against = f"{round(100 * difference, 2) + 0.0:+.2f} %"  # + 0.0 turns -0.00 into 0.00
    sent, of_ddp = summary.bytes_in_steps, "nothing sent"
    if sent and summary.ddp_bytes:
        of_ddp = share(summary.ddp_bytes / sent)
    besides = summary.bytes_sent - sent
    how = "counted" if summary.bytes_are_counted else "computed"
    found = [
        Cell(f"{summary.validation_loss:.4f}"),
        Cell(against),
        Cell(f"{summary.perplexity:.2f}"),
        Cell(plain(summary.seconds)),
        _seconds(spent.exposed, "not measured"),
        _seconds(spent.hidden, "not known"),
        Cell(human_bytes(sent), f"{how}; {human_bytes(besides)} besides" if besides else how),
        Cell(of_ddp),
    ]
    if plan.bandwidth:
        interfaces = outcome.record.interface_bytes or []
        found.append(Cell(human_bytes(max(interfaces)) if interfaces else "-"))
    return found


def methods(outcomes: Sequence[Outcome], plan: Plan) -> list[str]:
    """Explain how each figure was obtained."""
    lines = [
        "Validation loss and perplexity: of the weights after training, over the whole validation"
        " split, in nats per token. The curves are of the validations on the way, over what"
        " trainer.limit_val_batches takes; the star is the final figure.",
        "Seconds: from the first batch to the end of training, validations included.",
        "Exposed: seconds that rank 0 stood still for communication since its first step, which"
        " includes waiting for a rank that is late. The library's strategies count them in"
        " their ledger; for DDP they are torch's own statistics, from the end of"
        " backward's computation to that of its all-reduces. A model that is divided over ranks"
        " (Domino) communicates in validations, too, and that is in its figures.",
    ]
    if plan.bandwidth is None:
        lines.append(
            "Hidden: not known here. Communication between processes of one machine has no link"
            " whose time could be known; with bandwidth=100mbit it is."
        )
    else:
        lines.append(
            f"Hidden: what the bytes that rank 0 sent need at {plan.bandwidth}, less the exposed"
            " seconds, at least 0. It is computed and a lower bound: headers and rounds of small"
            " messages take time, too, and some of what was waited for was a late rank."
        )
    lines.append(
        "Sent in steps: rank 0's bytes of the collectives of training steps, counted in the ledger"
        " when they leave. Besides: those of the start, of validations, checkpoints and the last"
        " exchange. DDP has no ledger: for it they are computed from the all-reduce of fp32"
        " gradients and, besides, the broadcast of weights and buffers at the start. Barriers and"
        " validation's sums, which Lightning sends by itself, are not in it. Of fp32 DDP's: set"
        " against what fp32 DDP would have sent in as many steps on as many ranks."
    )
    if plan.bandwidth:
        lines.append(
            "A node's interface sent: all that left the busiest node from the start of the job to"
            " its end, headers, start-up and Lightning's own traffic included, as its network"
            " interface counted it."
        )
    return lines


def _seconds(value: float | None, otherwise: str) -> Cell:
    return Cell(otherwise if value is None else f"{plain(value)} s")


def _row(place: int, outcomes: Sequence[Outcome], plan: Plan) -> dict[str, Any]:
    outcome = outcomes[place]
    job, record = outcome.job, outcome.record
    good = outcome.measured is not None
    return {
        "name": job.name,
        "color": color(place),
        "cells": cells(outcome, outcomes[0].measured, plan) if good else [],
        "failure": "" if good else failure_text(record),
        "notes": " ".join(job.notes) or "nothing.",
        "command": shlex.join(["python", *record.command]),
    }


def _pictures(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    if not any(outcome.measured for outcome in outcomes):
        return []
    return [
        {"alt": alt, "base64": base64.b64encode(svg(draw, outcomes).encode()).decode()}
        for alt, draw in DRAWINGS.items()
    ]


def _provenances(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the provenance of the figures; jobs kept from earlier runs may differ in it."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for outcome in outcomes:
        lines = tuple(line.removeprefix("- ").replace("`", "") for line in outcome.record.made_by)
        kinds.setdefault(lines, []).append(outcome.job.name)
    if len(kinds) == 1:
        return [list(lines) for lines in kinds]
    return [[f"jobs: {', '.join(names)}", *lines] for lines, names in kinds.items()]
