"""Ranks that end their part at a crossing, together or alone; each rank is a thread here."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from lightning_commfree.comm.crossings import Crossings
from lightning_commfree.comm.peers import PeerWatch
from tests.comm.watches import watches

Stays = tuple[bool, ...]  # by crossing


def play(ranks: list[PeerWatch], wishes: list[Stays], slow_s: float = 0.0) -> list[list[bool]]:
    """Return by rank what each was told at the crossings at which it wanted to stay."""

    def walk(rank: int) -> list[bool]:
        crossings, told = Crossings(ranks[rank]), []
        for stays in wishes[rank]:
            time.sleep(slow_s * rank)
            if not stays:
                crossings.pass_by()
            else:
                told.append(crossings.all_stay())
                if told[-1]:
                    break
        return told

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(walk, range(len(ranks))))


@pytest.mark.parametrize("slow_s", [0.0, 0.2])
@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ([(False, True), (False, True), (False, True)], [[True], [True], [True]]),
        ([(True, False), (False, False), (False, False)], [[False], [], []]),
        ([(False, False), (False, False), (True, True)], [[], [], [False, False]]),
        ([(True, True), (False, True), (True, True)], [[False, True], [True], [False, True]]),
        ([(True, False), (False, True), (False, False)], [[False], [False], []]),
    ],
)
def test_they_stay_if_all_do(wishes: list[Stays], told: list[list[bool]], slow_s: float) -> None:
    with watches(3) as ranks:
        assert play(ranks, wishes, slow_s) == told


def test_a_rank_that_stayed_and_has_closed_its_channel_still_counts() -> None:
    with watches(2) as (first, second):
        with ThreadPoolExecutor(1) as threads:
            early = threads.submit(Crossings(first).all_stay)
            late = Crossings(second)
            late._tell(stays=True)  # the first one finds so, and the second one asks later
            assert early.result()
        first.close()
        assert late.all_stay()


def test_a_single_rank_and_ranks_without_address() -> None:
    assert Crossings(None).all_stay()
    with watches(2) as (first, second):
        first.meet({1: bytes(64)})
        assert not Crossings(first).all_stay()
        assert not play([second], [(False,)])[0]


def test_who_does_not_come_is_waited_for_until_the_timeout_and_who_is_gone_is_named() -> None:
    with watches(2, timedelta(seconds=0.5)) as (first, second):
        with pytest.raises(RuntimeError, match="not all of the others have come as far"):
            Crossings(first).all_stay()
        second._listener.close()  # as a process that ends without a word
        with pytest.raises(RuntimeError, match=r"The exchange 'end' failed .*: rank 1 is gone"):
            Crossings(first).all_stay()
