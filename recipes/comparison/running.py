"""Run the jobs of a comparison one after the other and keep finished ones.

Besides the recipe's files, a job's folder contains `job.json` (its command and how it ended) and
`output.log` (everything it printed; in the laboratory one per node).
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
LOG_FILE = "output.log"  # in the laboratory there is one per node, written when the jobs have ended
TIMED_OUT = 124  # the exit code of coreutils' `timeout`
_GRACE_S = 5.0  # for a job to end after SIGTERM
_TAIL_LINES = 15


@dataclass(frozen=True)
class Record:
    """The outcome of a job, as written to `job.json`.

    Attributes:
        command: arguments of the interpreter.
        bandwidth: of every node's link; None without the laboratory.
        nodes: of the laboratory; None without it.
        returncode: 0 after success; None: interrupted.
        interface_bytes: sent by each node's interface during the whole job, including headers and
            Lightning's own messages; None without the laboratory.
        logs: files with its output.
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
    """Check that the laboratory is available if the plan needs it.

    Raises:
        LaboratoryUnavailable: it is not; with the reason.
        ValueError: bandwidth or number of nodes is not legal.
    """
    if plan.bandwidth is None:
        return
    NetLab(plan.nodes, plan.bandwidth)
    reason = why_unavailable()
    if reason:
        raise LaboratoryUnavailable(reason)


def finished(job: Job, plan: Plan) -> Record | None:
    """Return the record of a finished job; None for a job that still has to run.

    Raises:
        ValueError: its folder contains something else.
    """
    path = job.folder / RECORD_FILE
    if not job.folder.exists():
        return None
    if not path.exists():
        raise ValueError(
            f"{job.folder} exists but is not a job of a comparison. Give another folder:"
            " run_dir=..."
        )
    record, asked = Record(**json.loads(path.read_text())), _asked(job, plan)
    if (record.command, record.bandwidth, record.nodes) != (
        asked.command,
        asked.bandwidth,
        asked.nodes,
    ):
        raise ValueError(
            f"{job.folder} contains a job of another command: {_shown(record)}. This one is"
            f" {_shown(asked)}. Give the same command, or another folder: run_dir=..."
        )
    return record if record.returncode == 0 else None


def run_all(jobs: Sequence[Job], plan: Plan, console: Console) -> list[Record]:
    """Run the unfinished jobs and report their progress on the console.

    Args:
        jobs: of the comparison.
        plan: of the comparison.
        console: where to print.

    Returns:
        A record per job. The other jobs run even if one fails.

    Raises:
        ValueError: a job's folder contains something else; raised before any job runs.
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
    """Run a job from the start, after removing the files of an interrupted one."""
    if job.folder.exists():
        shutil.rmtree(job.folder)
    job.folder.mkdir(parents=True)
    asked = _asked(job, plan)
    _save(job, asked)  # marks the folder as ours, even if this process is killed
    if plan.bandwidth is None:
        log = job.folder / LOG_FILE
        returncode = _run_here(job, log, plan.timeout_s)
        record = Record(**{**asdict(asked), "returncode": returncode, "logs": [str(log)]})
    else:
        record = _run_in_laboratory(job, asked, plan)
    _save(job, record)
    return record


def failure_text(record: Record) -> str:
    """Describe how a job failed, with the path and the last lines of its output."""
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
            # so that Ctrl-C reaches only this process, which then ends the job and all its ranks
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job and any processes left in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):  # no process is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_in_laboratory(job: Job, asked: Record, plan: Plan) -> Record:
    command = [sys.executable, *job.arguments]
    # as torchrun would set it: the nodes share the cores of this machine
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    start = time.monotonic()
    with NetLab(plan.nodes, plan.bandwidth) as laboratory:
        results = laboratory.run([command] * plan.nodes, plan.timeout_s or math.inf, env)
    logs = [job.folder / f"output-node{node}.log" for node in range(plan.nodes)]
    for log, result in zip(logs, results, strict=True):
        log.write_text(result.output)
    codes = [result.returncode for result in results]
    # prefer the rank that failed by itself over those that were ended because of it
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
    made_by = lines_of("")[1:]  # the page shows the command
    return Record(job.arguments, plan.bandwidth, nodes, None, None, [], made_by)


def _shown(record: Record) -> str:
    where = "" if record.bandwidth is None else f" at {record.bandwidth} on {record.nodes} nodes"
    return f"`python {' '.join(record.command)}`{where}"


def _save(job: Job, record: Record) -> None:
    path = job.folder / RECORD_FILE
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(asdict(record), indent=1) + "\n")
    half.replace(path)  # never leaves half a file
