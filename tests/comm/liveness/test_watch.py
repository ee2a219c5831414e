"""Who is gone? On real gloo ranks that are killed, stopped, slow or failing."""

from __future__ import annotations

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
from lightning_commfree.comm.liveness import watch as watching
from tests.comm.watches import LONG, Broken, Endless, watches
from tests.mortal import End, run_mortals
from tests.world import run_ranks

SOON_S = 10.0  # gloo overlooks one death in a hundred; the question that finds it comes after 5
LARGE = 1 << 22  # elements; gloo needs longer for them than a rank to kill itself


def world_channel(rank: int, size: int, timeout: timedelta = LONG) -> Channel:
    channel = Channel.open([list(range(size))], rank, Ledger(), timeout=timeout)
    channel.all_reduce(torch.ones(1), "first").wait()
    return channel


def blamed(error: str) -> list[int]:
    """The ranks that an error calls lost; the rank that speaks stands before the colon."""
    found = re.fullmatch(
        r"RuntimeError: The exchange '\w+' failed on rank \d after [\d.]+ s"
        r" \((?s:.*?)\): (rank (?s:.*))\. Restart all ranks from the last checkpoint\.",
        error,
    )
    assert found, error
    return [int(rank) for rank in re.findall(r"(?:^|; )rank (\d+) ", found[1])]


def survivors(ends: list[End], gone: int) -> list[End]:
    return [end for rank, end in enumerate(ends) if rank != gone]


# A rank that is killed


def lose_rank_1(rank: int, size: int, name: str) -> Any:
    channel = world_channel(rank, size)
    start = time.monotonic()
    try:
        for _ in range(2):  # the first one may have got through to this rank
            pending = getattr(channel, name)(torch.ones(size, LARGE // size), "large")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            pending.wait()
    finally:
        assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize("linger", [False, True])
@pytest.mark.parametrize(
    ("size", "name"), [(2, "all_reduce"), (3, "all_to_all"), (4, "all_gather"), (4, "all_reduce")]
)
def test_every_survivor_names_the_killed_rank_alone(
    size: int, name: str, linger: bool, tmp_path: Path
) -> None:
    """With `linger` nobody leaves, so nothing but the news reaches the ranks not adjacent; without
    it, ranks that merely left must not be blamed."""
    ends = run_mortals(lose_rank_1, size, tmp_path, name, linger=linger)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in survivors(ends, 1):
        assert blamed(end.error) == [1], end.error
        assert "rank 1 is gone" in end.error
        assert "The exchange 'large'" in end.error


def come_late(rank: int, size: int, folder: Path) -> Any:
    """Rank 1 is killed, rank 0 fails and its process ends; rank 2 knows of neither and launches.

    An all-to-all, in which rank 0 hears of rank 1's end without the help of rank 2.
    """
    channel = world_channel(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while rank == 2 and not (folder / "end_0.pt").exists():
        time.sleep(0.05)
    if rank == 2:
        time.sleep(0.5)  # until the process of rank 0 is gone too
    return channel.all_to_all(torch.ones(3, 1), "late").wait()


def test_a_rank_that_left_because_of_it_is_not_blamed(tmp_path: Path) -> None:
    first, _, late = run_mortals(come_late, 3, tmp_path, tmp_path)
    assert blamed(first.error) == [1]
    assert blamed(late.error) == [1]
    assert late.failed_s > first.failed_s + 0.4, "else rank 0 was still there"


def fail_alone(rank: int, size: int) -> Any:
    channel = world_channel(rank, size)
    if rank == 2:
        channel.close()  # as a strategy does when an exception ends its fit
        raise ValueError("of the user's own making")
    return channel.all_gather(torch.ones(3), "gather").wait()


@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_that_raised_and_left_is_named(size: int, tmp_path: Path) -> None:
    ends = run_mortals(fail_alone, size, tmp_path)
    assert "of the user's own making" in ends[2].error
    for end in survivors(ends, 2):
        assert blamed(end.error) == [2], end.error


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


def lose_rank_1_in_a_barrier(rank: int, size: int) -> None:
    channel = world_channel(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with channel.naming_lost("barrier"):
        dist.barrier()


def test_what_others_exchange_can_be_named_too(tmp_path: Path) -> None:
    ends = run_mortals(lose_rank_1_in_a_barrier, 3, tmp_path)
    for end in survivors(ends, 1):
        assert blamed(end.error) == [1], end.error
        assert "The exchange 'barrier'" in end.error
    with (
        pytest.raises(RuntimeError, match="^own$"),
        Channel([0], 0, Ledger()).naming_lost("barrier"),
    ):
        raise RuntimeError("own")


# A rank that does not come


PATIENCE = timedelta(seconds=4)


def wait_for_rank_1(rank: int, size: int, stopped: bool) -> Any:
    channel = world_channel(rank, size, PATIENCE)
    if rank == 1 and stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        time.sleep(PATIENCE.total_seconds() + 2.0)
    start = time.monotonic()
    try:
        return channel.all_reduce(torch.ones(3), "waiting").wait()
    except RuntimeError as error:
        raise RuntimeError(f"{error} [{time.monotonic() - start:.2f}]") from None


def after(end: End) -> tuple[str, float]:
    text, seconds = re.fullmatch(r"(.*) \[([\d.]+)\]", end.error, re.DOTALL).groups()
    return text, float(seconds)


def test_a_stopped_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    """Its kernel goes on accepting connections, so a check that only connects finds it alive."""
    ends = run_mortals(wait_for_rank_1, 3, tmp_path, True)
    assert not ends[1].error
    for end in survivors(ends, 1):
        text, seconds = after(end)
        assert blamed(text) == [1], text
        assert "rank 1 does not answer" in text
        assert seconds < PATIENCE.total_seconds() + 1.5


def test_a_rank_that_is_merely_behind_is_told_from_a_lost_one(tmp_path: Path) -> None:
    ends = run_mortals(wait_for_rank_1, 3, tmp_path, False, linger=True)
    for rank, end in enumerate(ends):
        text, seconds = after(end)
        assert blamed(text) == [1], text
        speaker = 0 if "where rank 0" in text else 2
        assert f"launched 1 exchanges where rank {speaker} has launched 2" in text
        limit = 0.5 if rank == 1 else PATIENCE.total_seconds() + 1.5
        assert seconds < limit, "the late rank is told at its launch, the others at the timeout"


# What it costs, where it listens, how it ends


def open_and_look(rank: int, size: int) -> Any:
    channel = Channel.open([list(range(size))], rank, Ledger())
    threads = [thread.name for thread in threading.enumerate()]
    sent = dict(channel.ledger.bytes_by_tag)
    channel.close()
    left = [thread.name for thread in threading.enumerate()]
    return sent, threads.count("peer-watch"), left.count("peer-watch")


def test_a_channel_costs_64_bytes_a_peer_and_a_thread_until_it_is_closed(tmp_path: Path) -> None:
    for outcome in run_ranks(open_and_look, 3, tmp_path):
        assert outcome == ({TAG: all_gather_bytes(64, 3)}, 1, 0)
    for outcome in run_ranks(open_and_look, 1, tmp_path):
        assert outcome == ({}, 0, 0)


class JustInTime:
    """A collective that ends well right after the first wait for it has given up."""

    def __init__(self) -> None:
        self.waits = 0

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")


def test_a_success_that_comes_late_is_one() -> None:
    with watches(2) as (watch, _):
        work = JustInTime()
        watch.wait([work], "t")
        assert work.waits == 2


def test_without_a_culprit_the_error_says_that_all_answer() -> None:
    with watches(3) as (watch, other, _), pytest.raises(RuntimeError) as caught:
        watch.wait([Broken()], "t")
    assert "(Connection closed by peer): rank 0 gave up on the exchange 't'" in str(caught.value)
    assert "all other ranks that could be asked answer" in str(caught.value)
    assert "make `timeout` over twice an outage)" in str(caught.value)
    with pytest.raises(RuntimeError, match="rank 0 gave up on the exchange 't'"):
        other.wait([Endless()], "u")


def test_the_first_finding_stays() -> None:
    with watches(3) as (watch, other, third):
        third.close()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 2 is gone"):
                watch.wait([Broken()], "t")
        watch.close()
        with (
            pytest.raises(RuntimeError, match="rank 2 is gone") as caught,
            other.launching("u"),
        ):
            pytest.fail("nothing is launched on a group that is known to be broken")
    assert "rank 0" not in str(caught.value)


def test_a_death_that_gloo_overlooks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.3)
    with watches(3) as (watch, other, third):
        other._listener.close()  # as a process that ends without a word
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 is gone"), watch.launching("t"):
            watch.wait([Endless()], "t")
        assert time.monotonic() - start < 3.0
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            third.wait([Endless()], "t")


def test_a_rank_that_took_its_part_and_left_may_still_have_bytes_on_the_wire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.3)
    with watches(2, timedelta(seconds=2)) as (watch, other):
        with watch.launching("t"), other.launching("t"):
            pass
        other.close()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            watch.wait([Endless()], "t")
        assert time.monotonic() - start >= 2.0
    with watches(2, timedelta(seconds=20)) as (watch, other):
        with watch.launching("t"):
            other.close()  # before it took part
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="a rank is gone that it waits for"):
            watch.wait([Endless()], "t")
        assert time.monotonic() - start < 3.0
