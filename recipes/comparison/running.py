"""Runs the jobs of a comparison one after the other, and keeps what is done.

A job's folder holds, beside what the recipe writes, `job.json` (what was asked and how it ended)
and `output.log` (all that it printed; in the laboratory one per node).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.lab import LaboratoryUnavailable, NetLab, why_unavailable
from recipes.comparison.jobs import Job, Plan
from recipes.comparison.watching import watched
from recipes.training.provenance import lines_of

RECORD_FILE = "job.json"
LOG_FILE = "output.log"  # of the laboratory's jobs there is one for each node, when they have ended
TIMED_OUT = 124  # the exit code of coreutils' `timeout`
_GRACE_S = 5.0  # for a job that is told to end
_TAIL_LINES = 15


@dataclass(frozen=True)
class Record:
    """How a job ended; `job.json` holds it.

    Attributes:
        command: what ran, but for the interpreter.
        bandwidth: of every node's link; None: no laboratory.
        nodes: of the laboratory; None: no laboratory.
        returncode: 0 when all went well; None: it was interrupted.
        interface_bytes: what each node's interface has sent, from start to end of the job, with
            headers and with what Lightning sends by itself; None: no laboratory.
        logs: files with what it has printed.
        made_by: commit, hardware and versions, as lines of Markdown.
    """

    command: list[str]
    bandwidth: str | None
    nodes: int | None
    returncode: int | None
    interface_bytes: list[int] | None
    logs: list[str]
    made_by: list[str]


def check_laboratory(plan: Plan) -> None:
    """Check that the laboratory can be had, where the plan asks for it.

    Raises:
        LaboratoryUnavailable: it cannot; with the reason.
        ValueError: bandwidth or number of nodes is not legal.
    """
    if plan.bandwidth is None:
        return
    NetLab(plan.nodes, plan.bandwidth)
    reason = why_unavailable()
    if reason:
        raise LaboratoryUnavailable(reason)


def finished(job: Job, plan: Plan) -> Record | None:
    """Return the record of a job that is done; None for one that is to be run (again).

    Raises:
        ValueError: its folder holds something else.
    """
    path = job.folder / RECORD_FILE
    if not job.folder.exists():
        return None
    if not path.exists():
        raise ValueError(
            f"{job.folder} exists and is no job of a comparison. Give another folder: run_dir=..."
        )
    record, asked = Record(**json.loads(path.read_text())), _asked(job, plan)
    if (record.command, record.bandwidth, record.nodes) != (
        asked.command,
        asked.bandwidth,
        asked.nodes,
    ):
        raise ValueError(
            f"{job.folder} holds a job of another command: {_shown(record)}. This one is"
            f" {_shown(asked)}. Give the same command, or another folder: run_dir=..."
        )
    return record if record.returncode == 0 else None


def run_all(jobs: Sequence[Job], plan: Plan, console: Console) -> list[Record]:
    """Run what is not done yet, and say on the console how it goes.

    Args:
        jobs: of the comparison.
        plan: of the comparison.
        console: where to print.

    Returns:
        A record per job. A job that failed does not keep the others from running.

    Raises:
        ValueError: a job's folder holds something else. Before any is run.
    """
    kept = [finished(job, plan) for job in jobs]
    records = []
    for number, (job, record) in enumerate(zip(jobs, kept, strict=True), 1):
        place = f"[{number}/{len(jobs)}] {job.name}"
        if record is not None:
            text = f"{place}: kept, it is done already ({job.folder})"
            console.print(text, markup=False, soft_wrap=True)
        else:
            start = time.monotonic()
            text = f"{place}: runs; what it prints goes to {job.folder}"
            console.print(text, markup=False, soft_wrap=True)
            with watched(job.folder / LOG_FILE, place, console):
                record = run(job, plan)
            how = "done" if record.returncode == 0 else "FAILED"
            console.print(f"{place}: {how}, {time.monotonic() - start:.0f} s", markup=False)
            if record.returncode:
                console.print(failure_text(record), markup=False, highlight=False, soft_wrap=True)
        records.append(record)
    return records


def run(job: Job, plan: Plan) -> Record:
    """Run a job from the start; what an interrupted one has left in its folder is removed."""
    if job.folder.exists():
        shutil.rmtree(job.folder)
    job.folder.mkdir(parents=True)
    asked = _asked(job, plan)
    _save(job, asked)  # from here on the folder is known as ours, even if this is cut off
    if plan.bandwidth is None:
        log = job.folder / LOG_FILE
        returncode = _run_here(job, log, plan.timeout_s)
        record = Record(**{**asdict(asked), "returncode": returncode, "logs": [str(log)]})
    else:
        record = _run_in_laboratory(job, asked, plan)
    _save(job, record)
    return record


def failure_text(record: Record) -> str:
    """Return how a job failed and where its output lies, with the last lines of it."""
    code = record.returncode
    how = "took too long and was ended" if code == TIMED_OUT else f"ended with exit code {code}"
    texts = [f"It {how}. All that it printed: {', '.join(record.logs)}"]
    for log in record.logs:
        lines = [
            line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()
        ]
        texts += [f"The last lines of {Path(log).name}:", *lines[-_TAIL_LINES:]]
    return "\n".join(texts)


def _run_here(job: Job, log: Path, timeout_s: float | None) -> int:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *job.arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for us: we end the job and all its ranks
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job, if it has not ended, and what it has left of its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):  # when nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_in_laboratory(job: Job, asked: Record, plan: Plan) -> Record:
    command = [sys.executable, *job.arguments]
    # what torchrun would say: the nodes share the cores of this machine
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    start = time.monotonic()
    with NetLab(plan.nodes, plan.bandwidth) as laboratory:
        results = laboratory.run([command] * plan.nodes, plan.timeout_s or math.inf, env)
    logs = [job.folder / f"output-node{node}.log" for node in range(plan.nodes)]
    for log, result in zip(logs, results, strict=True):
        log.write_text(result.output)
    codes = [result.returncode for result in results]
    # of the one that failed by itself, if there is one, not of those that were ended for it
    returncode = max(codes) or min(codes)
    if returncode < 0 and plan.timeout_s and time.monotonic() - start > plan.timeout_s:
        returncode = TIMED_OUT
    return Record(
        **{
            **asdict(asked),
            "returncode": returncode,
            "interface_bytes": [result.sent_bytes for result in results],
            "logs": [str(log) for log in logs],
        }
    )


def _asked(job: Job, plan: Plan) -> Record:
    nodes = plan.nodes if plan.bandwidth else None
    made_by = lines_of("")[1:]  # the page has the command
    return Record(job.arguments, plan.bandwidth, nodes, None, None, [], made_by)


def _shown(record: Record) -> str:
    where = "" if record.bandwidth is None else f" at {record.bandwidth} on {record.nodes} nodes"
    return f"`python {' '.join(record.command)}`{where}"


def _save(job: Job, record: Record) -> None:
    path = job.folder / RECORD_FILE
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(asdict(record), indent=1) + "\n")
    half.replace(path)  # a reader never sees half a file
