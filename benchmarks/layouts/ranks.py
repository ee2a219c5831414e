"""Start the ranks of a measurement in new processes, and collect their results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RanksFailed(RuntimeError):  # noqa: N818 - named after the event
    """Ranks failed or were ended; the message gives the reason in one line."""


def run_ranks(plan: Mapping[str, Any], timeout_s: float, env: Mapping[str, str]) -> list[Any]:
    """Run `plan["ranks"]` ranks on this machine; return their results.

    Raises:
        RanksFailed: one failed, or all were ended by the timeout.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    here = {
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "layouts",  # Lightning detects torchrun by this variable
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.layouts.job", json.dumps(plan), folder],
            env={**os.environ, **here, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RanksFailed(f"not finished after {timeout_s:.0f} s") from None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        if job.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            raise RanksFailed(f"exit code {job.returncode}, {last}")
        files = (Path(folder) / f"{rank}.json" for rank in range(plan["ranks"]))
        return [json.loads(file.read_text()) for file in files]
