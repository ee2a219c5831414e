"""Liveness that is switched off: no port, no thread; errors pass as they are, nobody is asked."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from tests.mortal import run_mortals
from tests.world import run_ranks

TIMEOUT = timedelta(seconds=4)
OFF = ((False, False), (True, False))  # by rank: on both ranks, or on one of them


def exchange(rank: int, size: int) -> Any:
    found = []
    for liveness in OFF:
        channel = Channel.open([[0, 1]], rank, Ledger(), liveness=liveness[rank])
        threads = [thread.name for thread in threading.enumerate()]
        total = float(channel.all_reduce(torch.ones(1), "t").wait())
        found.append((total, threads.count("peer-watch")))
        channel.close()
    return found


def test_exchanges_go_on_and_ranks_are_not_asked(tmp_path: Path) -> None:
    for rank, (on_no_rank, on_one_rank) in enumerate(run_ranks(exchange, 2, tmp_path)):
        assert on_no_rank == (2.0, 0)
        assert on_one_rank == (2.0, 1 - rank)


def lose_rank_1(rank: int, size: int) -> Any:
    channel = Channel.open([[0, 1, 2]], rank, Ledger(), timeout=TIMEOUT, liveness=False)
    channel.all_reduce(torch.ones(1), "first").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(2):  # the first one may have got through to this rank
            with channel.naming_lost("barrier"):
                channel.all_reduce(torch.ones(1 << 22), "large").wait()
    finally:
        assert time.monotonic() - start < 2 * TIMEOUT.total_seconds() + 2.0


def test_a_death_is_an_error_without_a_name(tmp_path: Path) -> None:
    ends = run_mortals(lose_rank_1, 3, tmp_path)
    for rank in (0, 2):
        assert ends[rank].error.startswith("RuntimeError")
        assert "is gone" not in ends[rank].error
