"""The end of a process that has been in a job."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch.distributed as dist
from lightning_commfree.comm import job

job.time.sleep = lambda seconds: print(f"waited {seconds}")
job.delay_exit(HOSTS)
job.delay_exit(HOSTS)
if JOINS:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("done")
"""


@pytest.mark.parametrize(("joins", "hosts", "waits"), [(1, 0, 0.05), (1, 1, 1.0), (0, 1, None)])
def test_gloos_threads_and_readers_of_the_store_have_a_moment_at_the_end(
    joins: int, hosts: int, waits: float | None
) -> None:
    """Without it ranks under srun were aborted behind a good fit, one in five on two cores."""
    code = SCRIPT.replace("JOINS", str(joins)).replace("HOSTS", str(hosts))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["done", *([f"waited {waits}"] if waits else [])]
