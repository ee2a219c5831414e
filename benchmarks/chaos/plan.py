"""Files between the command and the processes of a run; imports nothing that takes time.

In the folder of a run: `plan.json`; per replica `N.pid` and `N.log`, and `N.delay` if its next
process must wait; per process `N.PID.jsonl`, which survives SIGKILL; `checkpoints/`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

REPLICAS, LEAST = 3, 2  # with fewer than `LEAST`, all wait
FOLDER, TCP = "ElasticDiLoCo on a folder", "ElasticDiLoCo on a TCPStore"
S3 = "ElasticDiLoCo on S3"
OURS = (FOLDER, TCP, S3)
STREAMING, DDP, TORCHFT = "StreamingDiLoCo", "DDP", "torchft DiLoCo"
METHODS = (*OURS, STREAMING, DDP, TORCHFT)
RESTARTED = (STREAMING, DDP)  # torchrun restarts all processes when one ends
REPLICA = "CHAOS_REPLICA"  # environment variable; under torchrun, RANK


class Plan(NamedTuple):
    """What all processes of a run share; JSON values."""

    method: str
    config: dict[str, Any]  # of `recipes.pretrain`
    step_s: float  # the forward of a step takes at least this long
    sync_every: int  # H of the DiLoCo methods
    save_every: int  # steps between two checkpoints
    heartbeat_timeout_s: float  # of torchft
    meeting: str  # URL of the store or the lighthouse
    addresses: list[str]  # of the replicas
    ends_s: float  # no process runs longer; seconds since the epoch
    overlap_steps: int = 1  # of the DiLoCo methods: from a fragment's launch to its landing


class Row(NamedTuple):
    """A line of a process's log: the first when its model is built, then one per step.

    `at_s` is in seconds since the epoch, on the clock that all processes share.
    """

    at_s: float
    step: int  # position in the fit, which is the same on all replicas
    useful: float  # steps of this process, less those that the method has discarded
    kept: float  # of these, what the others have: it survives if the process is killed now


class Process(NamedTuple):
    """The log of a process; processes of a replica sort by their beginning."""

    rows: list[Row]
    pid: int


class Log:
    """Writes the log of this process."""

    def __init__(self, folder: Path, replica: int) -> None:
        path = folder / f"{replica}.{os.getpid()}.jsonl"
        self._file = path.open("w", buffering=1)  # by line: SIGKILL loses none
        self.write(0, 0, 0)

    def write(self, step: int, useful: float, kept: float) -> None:
        """Append a row with the current time."""
        self._file.write(json.dumps(Row(time.time(), step, useful, kept)) + "\n")


def read_plan(folder: Path) -> Plan:
    """Return the plan of the run in a folder."""
    return Plan(*json.loads((folder / "plan.json").read_text()))


def read_logs(folder: Path) -> dict[int, list[Process]]:
    """Return all processes so far, by replica, in the order in which they began."""
    found: dict[int, list[Process]] = {replica: [] for replica in range(REPLICAS)}
    for path in folder.glob("*.jsonl"):
        replica, pid = map(int, path.name.split(".")[:2])
        lines = path.read_text().splitlines(keepends=True)
        # a line that is still being written is left out
        rows = [Row(*json.loads(line)) for line in lines if line.endswith("\n")]
        if rows:
            found[replica].append(Process(rows, pid))
    return {replica: sorted(processes) for replica, processes in found.items()}


def read_pid(folder: Path, replica: int) -> int | None:
    """Return the process id of a replica's current process; None if it has ended."""
    file = folder / f"{replica}.pid"
    if not file.exists() or not (text := file.read_text()):
        return None
    try:
        words = Path(f"/proc/{text}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    # the id may belong to another program by now
    return int(text) if str(folder).encode() in words else None
