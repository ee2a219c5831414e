"""Real gloo processes that may die: `run_mortals` plays a function on n ranks, forked, of which any
may be killed, stopped or fail, and hands back how each ended. `run_jobs` plays several at a time,
because the survivors of each wait for seconds before they call a rank dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_commfree.comm import liveness
from tests.world import become_rank, free_port


@dataclass
class End:
    """How a rank ended: with a result, with an error, or by a signal and then with neither."""

    result: Any = None
    error: str = ""
    failed_s: float = 0.0  # when the error came, on the clock of `time.monotonic`
    exit_code: int | None = None  # minus the signal for a rank that was killed


def run_mortals(*args: Any, **kwargs: Any) -> list[End]:
    """Run a function on ranks, as `start_mortals` does, and return their ends by rank."""
    return start_mortals(*args, **kwargs)()


def run_jobs(jobs: Sequence[Callable[[], Callable[[], list[End]]]]) -> list[list[End]]:
    """Run jobs, each of which is a call of `start_mortals`, three at a time; return their ends."""
    found = []
    for first in range(0, len(jobs), 3):
        waits = [start() for start in jobs[first : first + 3]]
        found += [wait() for wait in waits]
    return found


def start_mortals(
    function: Callable[..., Any],
    size: int,
    folder: Path,
    *args: Any,
    timeout: timedelta = timedelta(seconds=30),
    linger: bool = False,
    limit_s: float = 40.0,
    quick: bool = True,
) -> Callable[[], list[End]]:
    """Start `function(rank, size, *args)` on `size` forked gloo ranks.

    Args:
        timeout: of the world's process group.
        linger: a rank that has failed keeps its process, and so its connections, until `limit_s`
            or until no rank runs any more.
        limit_s: after so many seconds every process that is left is killed.
        quick: a death is noticed after 2 s of silence instead of 3, to save time in many tests.

    Returns:
        A function that waits for the ranks, and returns their ends by rank.
    """
    context = multiprocessing.get_context("fork")
    over, port = context.Event(), free_port()
    stays = over if linger else None
    ranks = [
        context.Process(
            target=_play,
            args=(rank, size, port, folder, function, args, timeout, stays, quick),
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit_s

    def ends() -> list[End]:
        ended: set[int] = set()
        while len(ended) < size and time.monotonic() < deadline:
            ended = {
                rank
                for rank, process in enumerate(ranks)
                if (folder / f"end_{rank}.pt").exists() or _is_down(process)
            }
            time.sleep(0.05)
        over.set()
        for process in ranks:
            process.join(timeout=0.0 if _is_stopped(process) else 5.0)
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)  # a stopped one could not be waited for
                process.kill()
                process.join()
        return [_end(folder / f"end_{rank}.pt", process) for rank, process in enumerate(ranks)]

    return ends


def _play(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    function: Callable[..., Any],
    args: Any,
    timeout: timedelta,
    over: Any,
    quick: bool,
) -> None:
    if quick:  # in this forked process only
        liveness.HEARTBEAT_SECONDS, liveness.GONE_SECONDS = 0.2, 2.0
    become_rank(rank, size, port, timeout)
    end = End()
    try:
        end.result = function(rank, size, *args)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        end.error, end.failed_s = f"{type(error).__name__}: {error}", time.monotonic()
    torch.save(end, folder / f"writing_{rank}.pt")
    (folder / f"writing_{rank}.pt").rename(folder / f"end_{rank}.pt")
    if over is not None:
        over.wait()
    os._exit(0)  # a process group that lost a rank may take its whole timeout to come down


def _state(process: Any) -> str:
    stat = Path(f"/proc/{process.pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone"


def _is_stopped(process: Any) -> bool:
    return _state(process) == "T"


def _is_down(process: Any) -> bool:
    return process.exitcode is not None or _is_stopped(process)


def _end(path: Path, process: Any) -> End:
    end = torch.load(path, weights_only=False) if path.exists() else End()
    end.exit_code = process.exitcode
    return end


def wait_stopped(process: Any) -> None:
    """Wait until all threads of a process have stopped; those that run can still answer."""
    threads = Path(f"/proc/{process.pid}/task")
    end_s = time.monotonic() + 30
    while any(one.read_text().rpartition(") ")[2][0] != "T" for one in threads.glob("*/stat")):
        assert time.monotonic() < end_s, "it has not stopped"
        time.sleep(0.01)
