"""Read the results of a finished job and derive the figures of the comparison.

Reads `summary.json` and `history.json`, never printed output.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from lightning_commfree.comm.ledger import START
from recipes.comparison.jobs import Job
from recipes.comparison.running import Record
from recipes.training.progress import History
from recipes.training.report import HISTORY_FILE, SUMMARY_FILE
from recipes.training.summary import RunSummary

_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "": 1.0}


class Measured(NamedTuple):
    """Measurements of a successful job, on rank 0."""

    summary: RunSummary
    history: History


@dataclass(frozen=True)
class Outcome:
    """A job, its record, and its measurements, which are None if it failed."""

    job: Job
    record: Record
    measured: Measured | None


@dataclass(frozen=True)
class Times:
    """Breakdown of the seconds that rank 0 spent in a run.

    Attributes:
        total: from the first batch to the end of training, validations included.
        exposed: time spent waiting for communication and for other ranks since the first step;
            None: not measured.
        hidden: communication that rank 0 did not wait for, as a lower bound: the time that the
            bytes it sent since the first step take at the link's rate, minus `exposed`. None: the
            rate of the link is unknown.
    """

    total: float
    exposed: float | None
    hidden: float | None


def read_outcome(job: Job, record: Record) -> Outcome:
    """Read the results of a job.

    Raises:
        ValueError: it succeeded, but its files are missing or of another version.
    """
    if record.returncode != 0:
        return Outcome(job, record, None)
    try:
        summary = RunSummary(**json.loads((job.folder / SUMMARY_FILE).read_text()))
        history = History(**json.loads((job.folder / HISTORY_FILE).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{job.folder} has no {SUMMARY_FILE} and {HISTORY_FILE} that this version can read"
            f" ({error}). Give another folder: run_dir=..., and the job runs again."
        ) from error
    return Outcome(job, record, Measured(summary, history))


def times(outcome: Outcome) -> Times:
    """Return the breakdown of rank 0's seconds in a successful run."""
    assert outcome.measured is not None, "the job ended well"
    summary, rate = outcome.measured.summary, outcome.record.bandwidth
    exposed = summary.seconds_waited
    hidden = None
    if rate is not None and exposed is not None:
        since_the_start = summary.bytes_sent - sum(summary.bytes_by_phase.get(START, {}).values())
        on_the_link = 8 * since_the_start / bits_per_second(rate)
        hidden = min(max(on_the_link - exposed, 0.0), max(summary.seconds - exposed, 0.0))
    return Times(summary.seconds, exposed, hidden)


def bits_per_second(rate: str) -> float:
    """Convert a rate of the network laboratory, such as "100mbit", to a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    assert found is not None, "the laboratory has checked it"
    return float(found[1]) * _BITS[found[2]]


def tokens(history: History, steps: list[int]) -> list[int]:
    """Return the tokens that all ranks had trained on after the given steps."""
    return [step * history.tokens_per_step for step in steps]
