"""Ranks that come to the same places, or to others; each rank is a thread here."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from lightning_commfree.comm.peers import PeerWatch
from lightning_commfree.comm.places import Met, Places
from tests.comm.watches import watches

Walk = list[Any]  # numbers: so many steps are done; True or False: stands, and whether it ends


def play(ranks: list[PeerWatch], walks: list[Walk], slow_s: float = 0.0) -> list[list[Met]]:
    """Return by rank what it found where it stood; it leaves where not all do, or one ends."""

    def walk(rank: int) -> list[Met]:
        places, found = Places(ranks[rank]), list[Met]()
        for what in walks[rank]:
            time.sleep(slow_s * rank)
            if not isinstance(what, bool):
                places.move(what)
                continue
            found.append(places.stand(what))
            if found[-1].ends or not found[-1].all_stand:
                break
        places.leave()
        return found

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(walk, range(len(ranks))))


MET, ENDS = Met(True, False), Met(True, True)
PASSED, LEFT = Met(False, False, passed=True), Met(False, False)


@pytest.mark.parametrize("slow_s", [0.0, 0.1])
@pytest.mark.parametrize(
    ("walks", "found"),
    [
        ([[1, False]] * 3, [[MET]] * 3),
        ([[1, False, 2, False, False, 3, False, 4]] * 3, [[MET] * 4] * 3),
        ([[1, True], [1, False], [1, False]], [[ENDS]] * 3),
        ([[1, True], [1, True], [1, True]], [[ENDS]] * 3),
        ([[1], [1, False], [1, False]], [[], [LEFT], [LEFT]]),
        ([[1, False], [1, False, False], [1, False, False]], [[MET], [MET, LEFT], [MET, LEFT]]),
    ],
)
def test_they_find_the_same(walks: list[Walk], found: list[list[Met]], slow_s: float) -> None:
    with watches(3) as ranks:
        assert play(ranks, walks, slow_s) == found


def test_who_trains_on_has_passed() -> None:
    with watches(2) as (first, second):
        late = Places(second)
        late.move(2)
        early = Places(first)
        early.move(1)
        assert early.stand(False) == PASSED
        early.leave()
        assert late.stand(False) == LEFT


def test_who_has_met_and_stands_at_the_next_place_was_here() -> None:
    """It asks first, trains a step, and waits there: it has not passed."""
    with watches(2) as (first, second):
        slow, fast = Places(first), Places(second)
        slow.move(1)
        fast.move(1)
        with ThreadPoolExecutor(1) as threads:
            meeting = threads.submit(fast.stand, False)
            slow._here = slow._here._replace(step=1, number=1)
            slow._tell()  # the fast one finds so, and goes on before this one asks
            assert meeting.result() == MET
            fast.move(2)
            waiting = threads.submit(fast.stand, True)
            time.sleep(0.1)
            slow._here = slow._before
            assert slow.stand(False) == MET
            slow.move(2)
            assert slow.stand(False) == ENDS
            assert waiting.result() == ENDS


def test_a_single_rank_and_ranks_without_address() -> None:
    assert Places(None).stand(True) == ENDS
    with watches(2) as (first, _):
        first.meet({1: bytes(64)})
        assert Places(first).stand(False) == MET


def test_who_does_not_come_is_waited_for_until_the_timeout_and_who_is_gone_is_named() -> None:
    with watches(2, timedelta(seconds=0.5)) as (first, second):
        waiting, slow = Places(first), Places(second)
        slow.move(2)
        waiting.move(3)
        with pytest.raises(
            RuntimeError, match=r"waits for all others after step 3, .* rank 1 has done 2 steps"
        ):
            waiting.stand(False)
        second._listener.close()  # as a process that ends without a word
        with pytest.raises(RuntimeError, match=r"The exchange 'places' failed .*: rank 1 is gone"):
            waiting.stand(False)
