"""Start the ranks of a measurement, and end them before memory runs out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab import JobResult, NetLab

LEAST_FREE_BYTES = 2**30  # ranks are ended below this
_LOOK_EVERY_S = 0.05


class RanksFailed(RuntimeError):  # noqa: N818 - named after the event
    """Ranks failed or were ended; the message gives the reason in one line."""


def run_here(
    name: str,
    plan: Mapping[str, Any],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    least_free_bytes: int = LEAST_FREE_BYTES,
) -> list[Any]:
    """Run `plan["ranks"]` ranks on this machine; return their results.

    Raises:
        RanksFailed: one failed, or all were ended by the timeout or for lack of memory.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    here = {
        "GROUP_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "layouts",  # Lightning detects torchrun by this variable
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        job = subprocess.Popen(
            _command(name, plan, Path(folder)),
            env={**os.environ, **here, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            why = _wait(job, timeout_s, least_free_bytes)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
        if why or job.returncode:
            raise RanksFailed(why or _last_line(output, job.returncode))
        return _results(Path(folder), plan["ranks"])


def run_in_lab(
    lab: NetLab, name: str, plan: Mapping[str, Any], timeout_s: float, env: Mapping[str, str]
) -> list[Any]:
    """Run `plan["ranks"]` ranks in every node of a laboratory; return their results.

    Raises:
        RanksFailed: one failed, or all were ended by the timeout.
    """
    nodes = len(lab.names)
    with tempfile.TemporaryDirectory() as folder:
        commands = [_command(name, plan, Path(folder))] * nodes
        results = lab.run(commands, timeout_s, {**env, "OMP_NUM_THREADS": "1"})
        bad: list[JobResult] = [result for result in results if result.returncode]
        if bad:
            print(bad[0].output, file=sys.stderr)
            raise RanksFailed(_last_line(bad[0].output, bad[0].returncode))
        return _results(Path(folder), nodes * plan["ranks"])


def free_bytes() -> int:
    """Return the memory available to new processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    raise RuntimeError("/proc/meminfo contains no MemAvailable")


def _command(name: str, plan: Mapping[str, Any], folder: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.layouts.job", name, json.dumps(plan), str(folder)]


def _wait(job: subprocess.Popen[bytes], timeout_s: float, least_free: int) -> str | None:
    """Wait for the end of the job; return the reason if it must be ended."""
    deadline = time.monotonic() + timeout_s
    while job.poll() is None:
        if time.monotonic() > deadline:
            return f"not finished after {timeout_s:.0f} s"
        if free_bytes() < least_free:
            return f"ended: less than {least_free / 2**30:.1f} GiB of memory were free"
        time.sleep(_LOOK_EVERY_S)
    return None


def _results(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _last_line(output: str, returncode: int) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f"exit code {returncode}, {lines[-1].strip() if lines else 'no output'}"
