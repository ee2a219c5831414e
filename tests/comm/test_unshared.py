"""A rank that is killed while processes that it has forked off live on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.sockets import CloseOnFork
from tests.comm.watches import LONG
from tests.mortal import run_mortals


def be_busy(folder: Path) -> None:
    (folder / "worker").write_text(str(os.getpid()))
    time.sleep(30)


def leave_a_busy_worker(rank: int, size: int, folder: Path) -> Any:
    channel = Channel.open([[0, 1]], rank, Ledger(), timeout=LONG)
    if rank == 1:
        multiprocessing.get_context("fork").Process(target=be_busy, args=(folder,)).start()
        while not (folder / "worker").exists():
            time.sleep(0.05)
    channel.all_reduce(torch.ones(1), "t").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        channel.all_reduce(torch.ones(1), "t").wait()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


def test_a_rank_that_is_killed_is_gone_though_a_child_of_it_lives_on(tmp_path: Path) -> None:
    survivor, killed = run_mortals(leave_a_busy_worker, 2, tmp_path, tmp_path)
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, signal.SIGKILL)  # fails if it has not lived until now
    assert killed.exit_code == -signal.SIGKILL
    error, seconds = survivor.result
    assert "rank 1 is gone" in error
    assert seconds < 15, "the timeout is 60 s"


def look(unshared: CloseOnFork, descriptors: list[int], pipe: Any) -> None:
    pipe.send([os.path.exists(f"/dev/fd/{descriptor}") for descriptor in descriptors])


def test_children_close_what_was_opened_and_nothing_else() -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    unshared = CloseOnFork()
    with socket.socket() as before, socket.socket() as listener:
        with unshared.opening():
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            first = socket.create_connection(listener.getsockname())
            local, _ = socket.socketpair()
            replaced = socket.create_connection(listener.getsockname())
        descriptor = replaced.fileno()
        replaced.close()
        after = socket.socket()
        assert after.fileno() == descriptor, "the kernel gives the lowest that is free"
        opened = [before, listener, first, local, after]
        child = context.Process(
            target=look, args=(unshared, [one.fileno() for one in opened], theirs)
        )
        child.start()
        assert mine.recv() == [True, True, False, True, True]
        child.join()
        listener.accept()[0].sendall(b"here")  # the parent's own are as they were
        assert first.recv(4) == b"here"
        for one in (first, local, after):
            one.close()
