"""One process of a replica: `python -m benchmarks.chaos.replica FOLDER`.

A process that restarts costs its replica the time of its imports, as in any training, so the heavy
ones are inside functions: the process id must be known before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.chaos.plan import REPLICA, RESTARTED, TORCHFT, Log, read_plan


def main() -> None:
    """Train until the run ends."""
    folder = Path(sys.argv[1])
    replica = int(os.environ.get(REPLICA) or os.environ["RANK"])
    plan = read_plan(folder)
    (folder / f"{replica}.pid").write_text(str(os.getpid()))
    left_s = plan.ends_s - time.time()
    if left_s < 1:
        return  # torchrun has restarted what the alarm had ended
    signal.alarm(int(left_s))  # ends this process, even if the command was killed
    delay = folder / f"{replica}.delay"
    if delay.exists():
        seconds = float(delay.read_text())
        delay.unlink()
        time.sleep(seconds)

    if plan.method in RESTARTED:
        os.environ["MASTER_ADDR"] = plan.addresses[0]  # rank 0 is not on torchrun's node

    import torch

    torch.set_num_threads(1)
    if plan.method == TORCHFT:
        from benchmarks.chaos.torchft_loop import train
    else:
        from benchmarks.chaos.fit import train
    train(plan, replica, folder, lambda: Log(folder, replica))


if __name__ == "__main__":
    main()
