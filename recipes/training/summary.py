"""The figures of a finished fit, and how they are printed and saved."""

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

from lightning_commfree.comm.ledger import START, STEPS
from lightning_commfree.comm.text import counted, human_bytes, plain, traffic_sentences
from recipes.training.progress import History
from recipes.training.traffic import by_tag

_LINK_MBIT = 20  # per second, for an example: a slow uplink
_FRAME = 8  # columns of a panel for its frame and padding


@dataclass(frozen=True)
class RunSummary:
    """The figures of a finished fit, as written to `summary.json`."""

    steps: int  # optimizer steps
    tokens: int  # trained on, by all ranks
    seconds: float  # from the first batch to the end of training, validations included
    validation_loss: float  # nats per token, whole validation split, of the module after fit; nan
    # after an error
    perplexity: float  # exp(validation_loss)
    initial_loss: float | None  # the same before training; None if not requested
    unigram_loss: float | None  # nats per token, on the same tokens; None if not available
    bytes_in_steps: int  # sent by rank 0 in training steps
    bytes_sent: int  # by rank 0, in total
    bytes_by_phase: dict[str, dict[str, int]]  # the same by phase of the fit and by tag
    bytes_are_counted: bool  # by a ledger; otherwise computed by formulas
    ddp_bytes: int  # that fp32 DDP would have sent in as many steps; computed
    ddp_start_bytes: int  # that DDP would have sent before the first step; computed
    seconds_waited: float | None  # by rank 0 since the first step; None if not measured
    sample: str
    checkpoint: str | None
    huggingface: str | None  # folder of the exported model; None after a failure
    metrics: str | None
    figure: str
    adapter: str | None = None  # folder of the adapters, if only they were trained
    failure: str | None = None  # reason of a failure, as a sentence
    stopped_early: str | None = None  # reason given by Lightning's `EarlyStopping`


def write_json(content: RunSummary | History, path: Path) -> None:
    """Write the fields of a dataclass; null for numbers that JSON does not have (NaN, Inf)."""
    path.write_text(json.dumps(_plain(asdict(content)), indent=2, allow_nan=False) + "\n")


def summary_rows(summary: RunSummary) -> dict[str, str]:
    """Return the rows of the panel at the end, label to text."""
    in_all = _in_all(summary)
    rows = {
        "trained": f"{counted(summary.steps, 'step')}, {summary.tokens:,} tokens,"
        f" {summary.seconds:.0f} s",
        "stopped early": summary.stopped_early or "",
        "before": _loss(summary.initial_loss, "of the weights that it started from"),
        "validation loss": _loss(summary.validation_loss, "of the final weights"),
        "perplexity": f"{summary.perplexity:.2f}" if math.isfinite(summary.perplexity) else "",
        "unigram model": _loss(summary.unigram_loss, "on the same tokens"),
        "one rank sent": _sent(summary),
        "besides": _besides(summary),
        "fp32 DDP": _against_ddp(summary),
        "in all": in_all,
        "waited": "" if in_all else _waited(summary.seconds_waited),
        f"at {_LINK_MBIT} Mbit/s": _on_a_slow_link(summary),
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
    """Describe the bytes sent outside of training steps; empty if there are none."""
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
    times_less = summary.ddp_bytes / summary.bytes_in_steps
    return f"{text}{share(times_less)} {'of' if times_less > 1.005 else 'times'} that"


def _waited(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds:.2f} s for communication, rank 0"


def _in_all(summary: RunSummary) -> str:
    """Return the line with which a fit of several ranks ends; empty for Lightning's DDP."""
    waited_s = summary.seconds_waited
    if not (summary.bytes_are_counted and summary.ddp_bytes) or waited_s is None:
        return ""
    sent = summary.bytes_sent - sum(summary.bytes_by_phase.get(START, {}).values())
    return traffic_sentences(summary.steps, sent, summary.ddp_bytes, waited_s)


def _on_a_slow_link(summary: RunSummary) -> str:
    """Compare how long the bytes of a step take to send; empty if there is nothing to compare."""
    if not (summary.bytes_are_counted and summary.bytes_in_steps):
        return ""
    ours, ddp = (
        8 * sent / summary.steps / (1e6 * _LINK_MBIT)
        for sent in (summary.bytes_in_steps, summary.ddp_bytes)
    )
    return (
        f"the bytes of one step would take {_duration(ours)} on average, those of fp32 DDP"
        f" {_duration(ddp)} (computed)"
    )


def _duration(seconds: float) -> str:
    return f"{plain(1e3 * seconds)} ms" if seconds < 1 else f"{plain(seconds)} s"


def share(times_less: float) -> str:
    """Format a ratio: "1/12.3" for 12.3 times less, "1.5" for more."""
    return f"1/{plain(times_less)}" if times_less > 1.005 else plain(1 / max(times_less, 1e-9))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _loss(nats: float | None, of: str) -> str:
    return "" if nats is None or not math.isfinite(nats) else f"{nats:.4f} nats per token, {of}"


def shown(path: str | None) -> str:
    """Return a path relative to the working directory, to fit into the panel."""
    return "" if path is None else os.path.relpath(path)


def print_panel(title: str, rows: dict[str, str]) -> None:
    """Print rows of label and text in a frame, and rows with longer words below it.

    The frame would fold a long path in the middle of a word, so that it could not be copied.
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
            # not `add_row` with str: brackets in generated text are not markup
            table.add_row(Text(label), Text(text))
    console.print(Panel(table, title=title))
    for label, text in beneath.items():
        console.print(Text(f"{label}: {text}"), soft_wrap=True)
