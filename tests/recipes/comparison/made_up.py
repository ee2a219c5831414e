"""Outcomes of jobs that never ran, for figures and page."""

from __future__ import annotations

from pathlib import Path

from recipes.comparison.jobs import Job, Plan
from recipes.comparison.outcome import Measured, Outcome
from recipes.comparison.running import Record
from recipes.training.progress import History
from recipes.training.summary import RunSummary

LOSSES = {"ddp": 4.0, "streaming_diloco": 4.1}


def plan(folder: Path, bandwidth: str | None = None) -> Plan:
    return Plan(tuple(LOSSES), bandwidth, 2, None, {}, folder)


def outcome(
    name: str, folder: Path, bandwidth: str | None = None, notes: tuple[str, ...] = ()
) -> Outcome:
    """A run of 100 steps of 2048 tokens in 50 s, of which it has waited 2."""
    interfaces = [1_100_000, 1_200_000] if bandwidth else None
    job = Job(name, (f"strategy={name}",), folder / name, notes, 2048)
    record = Record(job.arguments, bandwidth, 2, 0, interfaces, [], ["- commit: `abc`"])
    return Outcome(job, record, measured(LOSSES[name], counted=name != "ddp"))


def measured(loss: float, counted: bool) -> Measured:
    in_steps = 1_000_000 if counted else 80_000_000
    summary = RunSummary(
        steps=100,
        tokens=204_800,
        seconds=50.0,
        validation_loss=loss,
        perplexity=2.718281828**loss,
        initial_loss=None,
        unigram_loss=5.8,
        bytes_in_steps=in_steps,
        bytes_sent=in_steps + 250_000,
        bytes_by_phase={"start": {"start": 250_000}, "steps": {"outer_gradient": in_steps}},
        bytes_are_counted=counted,
        ddp_bytes=80_000_000,
        ddp_start_bytes=400_000,
        seconds_waited=2.0,
        sample="",
        checkpoint=None,
        huggingface="",
        metrics=None,
        figure="",
    )
    history = History(
        tokens_per_step=2048,
        steps=[1, 50, 100],
        seconds=[0.4, 24.0, 50.0],
        train_loss=[7.0, 5.0, loss],
        bytes_sent=[0, in_steps // 2, in_steps],
        seconds_waited=[0.0, 1.0, 2.0],
        validation_steps=[50, 100],
        validation_seconds=[25.0, 50.0],
        validation_loss=[5.0, loss],
    )
    return Measured(summary, history)


def failed(name: str, folder: Path, output: str) -> Outcome:
    """A run that ended with exit code 3 after it printed something."""
    log = folder / "output.log"
    log.write_text(output)
    job = Job(name, (f"strategy={name}",), folder / name, (), 2048)
    record = Record(job.arguments, None, None, 3, None, [str(log)], ["- commit: `abc`"])
    return Outcome(job, record, None)
