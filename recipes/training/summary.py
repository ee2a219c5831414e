"""The figures of a finished fit, and how they are told."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_commfree.comm.ledger import STEPS
from recipes.training.progress import History
from recipes.training.traffic import by_tag, human_bytes

_FRAME = 8  # columns of a panel that its labels and texts cannot use


@dataclass(frozen=True)
class RunSummary:
    """The figures of a finished fit; `summary.json` holds them."""

    steps: int  # optimizer steps
    tokens: int  # trained on, by all ranks
    seconds: float  # from the first batch to the end of training, validations included
    validation_loss: float  # nats per token, whole validation split, of the module after fit; nan
    # where an error has ended the fit
    perplexity: float  # exp(validation_loss)
    initial_loss: float | None  # before training, likewise; None where nobody asked for it
    unigram_loss: float | None  # nats per token, on the same tokens; None where there is none
    bytes_in_steps: int  # sent by rank 0 in training steps
    bytes_sent: int  # by rank 0, all in all
    bytes_by_phase: dict[str, dict[str, int]]  # the same by phase of the fit and by tag
    bytes_are_counted: bool  # by a ledger; otherwise computed
    ddp_bytes: int  # what fp32 DDP would have sent in as many steps; computed
    ddp_start_bytes: int  # what DDP would have sent before the first of them; computed
    seconds_waited: float | None  # by rank 0 since the first step; None where nobody counts
    sample: str
    checkpoint: str | None
    huggingface: str | None  # folder of the exported model; None where the run has failed
    metrics: str | None
    figure: str
    adapter: str | None = None  # folder of the adapters alone, where only they were trained
    failure: str | None = None  # what went wrong, as a sentence


def write_json(content: RunSummary | History, path: Path) -> None:
    """Write the fields of a dataclass; null for numbers that JSON does not have (NaN, Inf)."""
    path.write_text(json.dumps(_plain(asdict(content)), indent=2, allow_nan=False) + "\n")


def summary_rows(summary: RunSummary) -> dict[str, str]:
    """Return what is printed at the end, label to text."""
    waited = summary.seconds_waited
    rows = {
        "trained": f"{summary.steps:,} steps, {summary.tokens:,} tokens, {summary.seconds:.0f} s",
        "before": _loss(summary.initial_loss, "of the weights that it started from"),
        "validation loss": _loss(summary.validation_loss, "of the final weights"),
        "perplexity": f"{summary.perplexity:.2f}" if math.isfinite(summary.perplexity) else "",
        "unigram model": _loss(summary.unigram_loss, "on the same tokens"),
        "one rank sent": _sent(summary),
        "besides": _besides(summary),
        "fp32 DDP": _against_ddp(summary),
        "waited": "not measured" if waited is None else f"{waited:.2f} s for communication, rank 0",
        "sample": re.sub(r"\n\s*\n", "\n", summary.sample),  # without its empty lines
        "checkpoint": shown(summary.checkpoint) or "none was written",
        "Hugging Face": shown(summary.huggingface),
        "adapter": shown(summary.adapter),
        "metrics": shown(summary.metrics) or "the loggers' own; `logger=csv` writes metrics.csv",
        "figure": shown(summary.figure),
    }
    return {label: text for label, text in rows.items() if text}


def _sent(summary: RunSummary) -> str:
    how = "counted" if summary.bytes_are_counted else "computed"
    text = f"{human_bytes(summary.bytes_in_steps)} in training steps ({how})"
    if not (summary.steps and summary.bytes_in_steps):
        return text
    in_steps = summary.bytes_by_phase[STEPS]
    per_step = {tag: sent / summary.steps for tag, sent in in_steps.items()}
    return f"{text}, {human_bytes(sum(per_step.values()))} per step: {by_tag(per_step)}"


def _besides(summary: RunSummary) -> str:
    """Return what was sent before, between and after the steps; empty where that is nothing."""
    phases = {name: sent for name, sent in summary.bytes_by_phase.items() if name != STEPS}
    return "; ".join(
        f"{name} {human_bytes(sum(sent.values()))} ({by_tag(sent)})"
        for name, sent in phases.items()
        if sum(sent.values())
    )


def _against_ddp(summary: RunSummary) -> str:
    text = f"{human_bytes(summary.ddp_bytes)} in as many steps (computed); this run's sent "
    if not summary.bytes_in_steps:
        return f"{text}none of it"
    in_all = (summary.ddp_bytes + summary.ddp_start_bytes) / summary.bytes_sent
    return (
        f"{text}{_part(summary.ddp_bytes / summary.bytes_in_steps)} that. All in all"
        f" {human_bytes(summary.bytes_sent)}, {_part(in_all)} what DDP sends with the"
        f" {human_bytes(summary.ddp_start_bytes)} of its start"
    )


def _part(times_less: float) -> str:
    return f"{share(times_less)} {'of' if times_less > 1.005 else 'times'}"


def share(times_less: float) -> str:
    """Return "1/12.3" for a number of which there is 12.3 times less, "1.5" for more of it."""
    return f"1/{times_less:,.3g}" if times_less > 1.005 else f"{1 / max(times_less, 1e-9):.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _loss(nats: float | None, of: str) -> str:
    return "" if nats is None or not math.isfinite(nats) else f"{nats:.4f} nats per token, {of}"


def shown(path: str | None) -> str:
    """Return a path as one would type it here; the panel is narrow."""
    return "" if path is None else os.path.relpath(path)


def print_panel(title: str, rows: dict[str, str]) -> None:
    """Print rows of a label and a text in a frame, those that do not fit beneath it.

    A path that is wider than the frame would be folded in the middle of a word, and nobody could
    copy it.
    """
    console = Console()
    room = console.width - max(map(len, rows)) - _FRAME
    beneath = {
        label: text for label, text in rows.items() if max(map(len, text.split()), default=0) > room
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows.items():
        if label not in beneath:
            # not `add_row(label, text)` on str: brackets in generated text are no markup
            table.add_row(Text(label), Text(text))
    console.print(Panel(table, title=title))
    for label, text in beneath.items():
        console.print(Text(f"{label}: {text}"), soft_wrap=True)
