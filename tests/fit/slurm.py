"""A pretended SLURM job, whose `scontrol` writes down what it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

JOB = "4711"


@contextmanager
def slurm_job(folder: Path, rank: int, size: int | None = None) -> Iterator[Path]:
    """Make this process look like a task of a job; yield the file with the calls of `scontrol`.

    With `size`, Lightning finds the environment of `srun` with so many tasks on one node.
    """
    tools, calls = folder / "tools", folder / "scontrol.txt"
    tools.mkdir(parents=True, exist_ok=True)
    script = tools / f"scontrol.{rank}"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    script.chmod(0o755)
    os.replace(script, tools / "scontrol")  # whole, as several ranks write it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tools), prepend=":")
        patch.setenv("SLURM_JOB_ID", JOB)
        if size is not None:
            patch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            for name, value in {
                "JOB_NAME": "train",
                "NODELIST": "127.0.0.1",
                "NNODES": 1,
                "NODEID": 0,
                "NTASKS": size,
                "NTASKS_PER_NODE": size,
                "PROCID": rank,
                "LOCALID": rank,
            }.items():
                patch.setenv(f"SLURM_{name}", str(value))
        yield calls
