"""Lost ranks are named: real gloo ranks that are killed, stopped, slow or failing."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes
from lightning_commfree.comm.liveness import TAG
from tests.comm.test_channel_links import bytes_on_the_interface, in_own_network, may_make_networks
from tests.comm.watches import LONG
from tests.mortal import End, run_mortals
from tests.world import run_ranks

SOON_S = 10.0
LARGE = 1 << 22  # elements; gloo needs longer for them than a rank to kill itself


def world_channel(rank: int, size: int, timeout: timedelta = LONG) -> Channel:
    channel = Channel.open([list(range(size))], rank, Ledger(), timeout=timeout)
    channel.all_reduce(torch.ones(1), "first").wait()
    return channel


def blamed(error: str) -> list[int]:
    """Return the ranks that an error calls lost; the rank that speaks comes before the colon."""
    found = re.fullmatch(
        r"PeerLostError: The exchange '\w+' failed on rank \d after [\d.]+ s"
        r" \((?s:.*?)\): (rank (?s:.*))\. Restart all ranks from the last checkpoint\.",
        error,
    )
    assert found, error
    assert len(error) < 500, "short enough to be read"
    return [int(rank) for rank in re.findall(r"(?:^|; )rank (\d+) ", found[1])]


def survivors(ends: list[End], gone: int) -> list[End]:
    return [end for rank, end in enumerate(ends) if rank != gone]


# A rank that is killed


def lose(rank: int, size: int, name: str, victim: int, how: int) -> Any:
    channel = world_channel(rank, size)
    start = time.monotonic()
    try:
        for _ in range(2):  # the first one may have got through to this rank
            pending = getattr(channel, name)(torch.ones(size, LARGE // size), "large")
            if rank == victim:
                os.kill(os.getpid(), how)
            pending.wait()
    finally:
        assert time.monotonic() - start < SOON_S, "the timeout is 60 s"
        closing = time.monotonic()
        channel.close()
        assert time.monotonic() - closing < 3.0, "not the rest of the timeout"


@pytest.mark.parametrize(
    ("size", "name", "linger"),
    [
        (2, "all_reduce", False),
        (3, "all_to_all", False),
        (4, "all_gather", True),
        (4, "all_reduce", False),
    ],
)
def test_every_survivor_names_the_killed_rank_alone(
    size: int, name: str, linger: bool, tmp_path: Path
) -> None:
    """With `linger` no connection but the dead rank's breaks, so the others must be told by the
    verdict; without it, ranks that merely left must not be blamed."""
    ends = run_mortals(lose, size, tmp_path, name, 1, signal.SIGKILL, linger=linger)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in survivors(ends, 1):
        assert blamed(end.error) == [1], end.error
        assert "rank 1 is gone" in end.error
        assert "The exchange 'large'" in end.error


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_is_named_though_the_store_is_lost_with_it(how: int, tmp_path: Path) -> None:
    ends = run_mortals(lose, 4, tmp_path, "all_reduce", 0, how, quick=False)
    for end in survivors(ends, 0):
        assert blamed(end.error) == [0], end.error
        assert "key-value store" in end.error


def come_late(rank: int, size: int, folder: Path) -> Any:
    """Rank 1 is killed, rank 2 fails and its process ends; rank 0 knows of neither and launches.

    An all-to-all, in which rank 2 hears of rank 1's end without the help of rank 0.
    """
    channel = world_channel(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while rank == 0 and not (folder / "end_2.pt").exists():
        time.sleep(0.05)
    if rank == 0:
        time.sleep(0.5)  # until the process of rank 2 has ended too
    return channel.all_to_all(torch.ones(3, 1), "late").wait()


def test_a_rank_that_left_because_of_it_is_not_blamed(tmp_path: Path) -> None:
    late, _, first = run_mortals(come_late, 3, tmp_path, tmp_path)
    assert blamed(first.error) == [1]
    assert blamed(late.error) == [1]
    assert late.failed_s > first.failed_s + 0.4, "else rank 2 was still there"


def lose_two(rank: int, size: int) -> Any:
    channel = world_channel(rank, size)
    if rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    return channel.all_reduce(torch.ones(3), "t").wait()


def test_two_lost_ranks_are_both_named(tmp_path: Path) -> None:
    ends = run_mortals(lose_two, 4, tmp_path)
    for rank in (0, 3):
        assert blamed(ends[rank].error) == [1, 2], ends[rank].error


# A rank that leaves, hangs, or is slow


def fail_alone(rank: int, size: int, victim: int) -> Any:
    channel = world_channel(rank, size)
    if rank == victim:
        channel.close()  # as a strategy does when an exception ends its fit
        raise ValueError("of the user's own making")
    start = time.monotonic()
    try:
        return channel.all_gather(torch.ones(3), "gather").wait()
    finally:
        assert time.monotonic() - start < SOON_S


def test_a_rank_that_raised_and_left_is_named(tmp_path: Path) -> None:
    victim = 0
    ends = run_mortals(fail_alone, 4, tmp_path, victim)
    assert "of the user's own making" in ends[victim].error
    for end in survivors(ends, victim):
        assert blamed(end.error) == [victim], end.error


def wait_for_stopped(rank: int, size: int) -> Any:
    channel = world_channel(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    try:
        return channel.all_reduce(torch.ones(3), "waiting").wait()
    finally:
        assert time.monotonic() - start < SOON_S, "the timeout is 60 s"


def test_a_stopped_rank_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    """No connection breaks: its kernel keeps them."""
    ends = run_mortals(wait_for_stopped, 3, tmp_path)
    assert not ends[1].error
    for end in survivors(ends, 1):
        assert blamed(end.error) == [1], end.error
        assert "no heartbeat" in end.error


PATIENCE = timedelta(seconds=4)


def come_after_the_timeout(rank: int, size: int) -> Any:
    channel = world_channel(rank, size, PATIENCE)
    if rank == 1:
        time.sleep(PATIENCE.total_seconds() + 2.0)
    start = time.monotonic()
    try:
        return channel.all_reduce(torch.ones(3), "waiting").wait()
    except RuntimeError as error:
        raise type(error)(f"{error} [{time.monotonic() - start:.2f}]") from None


def test_a_rank_that_is_merely_behind_is_told_from_a_lost_one(tmp_path: Path) -> None:
    ends = run_mortals(come_after_the_timeout, 3, tmp_path, linger=True)
    for rank, end in enumerate(ends):
        text, seconds = re.fullmatch(r"(.*) \[([\d.]+)\]", end.error, re.DOTALL).groups()
        assert blamed(text) == [1], text
        speaker = 0 if "while rank 0" in text else 2
        assert f"launched 1 exchanges, while rank {speaker} has launched 2" in text
        limit = 0.5 if rank == 1 else PATIENCE.total_seconds() + 3
        assert float(seconds) < limit, "the late rank is told at its launch"


# What it costs, and how it ends


def open_and_look(rank: int, size: int) -> Any:
    channel = Channel.open([list(range(size))], rank, Ledger())
    threads = [thread.name for thread in threading.enumerate()]
    sent = dict(channel.ledger.bytes_by_tag)
    dist.barrier()  # the threads end when rank 0, which hosts the store, closes its channel
    start = time.monotonic()
    channel.close()
    assert time.monotonic() - start < 0.4, "the thread is woken"
    left = [thread.name for thread in threading.enumerate()]
    dist.barrier()  # rank 0 takes the store with it
    return sent, threads.count("peer-watch"), left.count("peer-watch")


def test_it_costs_8_bytes_a_peer_and_a_thread_until_the_channel_is_closed(tmp_path: Path) -> None:
    for outcome in run_ranks(open_and_look, 3, tmp_path):
        assert outcome == ({TAG: all_gather_bytes(8, 3)}, 1, 0)
    for outcome in run_ranks(open_and_look, 1, tmp_path):
        assert outcome == ({}, 0, 0)


IDLE_S = 5.0


def idle(rank: int, size: int) -> float:
    """Return what all ranks put on the interface in a second in which nothing is exchanged."""
    channel = world_channel(rank, size)
    time.sleep(2.5)  # at first everybody reads everybody
    dist.barrier()
    time.sleep(0.2)
    before = bytes_on_the_interface()
    time.sleep(IDLE_S)
    sent = bytes_on_the_interface() - before
    dist.barrier()
    channel.close()
    return sent / IDLE_S


def test_a_rank_costs_the_network_one_to_two_kilobytes_a_second(tmp_path: Path) -> None:
    if not may_make_networks():
        pytest.skip("a network of its own needs Linux, root, `unshare` and `ip`")
    size = 3
    child = multiprocessing.get_context("fork").Process(
        target=in_own_network, args=(tmp_path, idle, size)
    )
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    rates = torch.load(tmp_path / "outcome.pt")
    assert all(500 < rate / size < 2000 for rate in rates), rates


def fit_after_a_lost_fit(rank: int, size: int) -> list[float]:
    """The store of the first channels, with their verdict in it, serves the next ones as well."""
    found = []
    for _ in range(2):
        channel = world_channel(rank, size)
        found.append(float(channel.all_reduce(torch.ones(1), "t").wait()))
        monitor = channel.peers.monitor
        assert monitor is not None
        monitor.announce({1: "is gone"})
        assert monitor.verdict
        dist.barrier()
        channel.close()
    dist.barrier()
    return found


def test_an_old_verdict_in_the_store_misleads_nobody(tmp_path: Path) -> None:
    """As after a restart by torchrun, whose agent keeps one store for all attempts."""
    assert run_ranks(fit_after_a_lost_fit, 2, tmp_path) == [[2.0, 2.0], [2.0, 2.0]]


# Liveness that is switched off

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


def test_switched_off_on_a_rank_it_is_off_on_all(tmp_path: Path) -> None:
    for outcome in run_ranks(exchange, 2, tmp_path):
        assert outcome == [(2.0, 0), (2.0, 0)]


def lose_rank_1_unwatched(rank: int, size: int) -> Any:
    channel = Channel.open([[0, 1, 2]], rank, Ledger(), timeout=PATIENCE, liveness=False)
    channel.all_reduce(torch.ones(1), "first").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):  # the first one may have got through to this rank
        with channel.peers.naming_lost("barrier"):
            channel.all_reduce(torch.ones(1 << 22), "large").wait()


def test_without_it_a_death_is_an_error_without_a_name(tmp_path: Path) -> None:
    ends = run_mortals(lose_rank_1_unwatched, 3, tmp_path)
    for rank in (0, 2):
        assert ends[rank].error.startswith("RuntimeError")
        assert "is gone" not in ends[rank].error
