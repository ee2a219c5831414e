"""The end of a process that has been in a job."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch.distributed as dist
from lightning_commfree.comm import world

world.time.sleep = lambda seconds: print(f"waited {seconds}")
world.leave_time_at_exit()
world.leave_time_at_exit()
if JOINS:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("done")
"""


@pytest.mark.parametrize("joins", [True, False])
def test_gloos_threads_have_a_moment_at_the_end(joins: bool) -> None:
    """Without it ranks under srun were aborted behind a good fit, one in five on two cores."""
    code = SCRIPT.replace("JOINS", str(joins))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["done", *(["waited 0.05"] if joins else [])]
