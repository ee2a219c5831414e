"""The end of a process that has been in a job."""

from __future__ import annotations

import subprocess
import sys

import lightning_commfree

# One interpreter, which imports once and forks a process for each case. The package is an empty
# one with our modules, so that `comm` comes without Lightning.
SCRIPT = f"""
import os, sys, types
sys.modules["lightning_commfree"] = package = types.ModuleType("lightning_commfree")
package.__path__ = {list(lightning_commfree.__path__)}
import torch.distributed as dist
from lightning_commfree.comm import job

job.time.sleep = lambda seconds: print("waited", seconds)
for joins, hosts_store in [(1, 0), (1, 1), (0, 1)]:
    if os.fork() == 0:
        job.delay_exit(hosts_store)
        job.delay_exit(hosts_store)
        if joins:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print("done")
        break
    assert os.wait()[1] == 0
"""


def test_gloos_threads_and_readers_of_the_store_have_a_moment_at_the_end() -> None:
    """Without it ranks under srun were aborted behind a good fit, one in five on two cores."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    waited = ["done", "waited 0.05", "done", "waited 1.0", "done"]
    assert done.stdout.splitlines() == waited
