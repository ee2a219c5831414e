"""Ranks that come to the same places, or to others; each rank is a thread here."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from lightning_commfree.comm.liveness import PeerWatch
from lightning_commfree.comm.meeting import Meeting, Met, Stage
from tests.comm.watches import watches

Walk = list[Any]  # numbers: so many steps are done; True or False: stands, and whether it ends
Stays = tuple[bool, ...]  # by step


def play(ranks: list[PeerWatch], walks: list[Walk], slow_s: float = 0.0) -> list[list[Met]]:
    """Return by rank what it found where it stood; it leaves where not all do, or one ends."""

    def walk(rank: int) -> list[Met]:
        meeting, found = Meeting(ranks[rank]), list[Met]()
        for what in walks[rank]:
            time.sleep(slow_s * rank)
            if not isinstance(what, bool):
                meeting.move(what)
                continue
            found.append(meeting.stand(what))
            if found[-1].ends or not found[-1].all_stand:
                break
        meeting.leave()
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


def stay(ranks: list[PeerWatch], wishes: list[Stays], slow_s: float = 0.0) -> list[list[bool]]:
    """Return by rank whether all stood where it stood; where not all do, it goes on with them."""

    def walk(rank: int) -> list[bool]:
        meeting, found = Meeting(ranks[rank]), list[bool]()
        for step, stays in enumerate(wishes[rank]):
            time.sleep(slow_s * rank)
            meeting.move(step)
            if stays:
                found.append(meeting.stand().all_stand)
                if found[-1]:
                    return found
        meeting.move(len(wishes[rank]))
        return found

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(walk, range(len(ranks))))


@pytest.mark.parametrize("slow_s", [0.0, 0.2])
@pytest.mark.parametrize(
    ("wishes", "found"),
    [
        ([(False, True), (False, True), (False, True)], [[True], [True], [True]]),
        ([(True, False), (False, False), (False, False)], [[False], [], []]),
        ([(False, False), (False, False), (True, True)], [[], [], [False, False]]),
        ([(True, True), (False, True), (True, True)], [[False, True], [True], [False, True]]),
        ([(True, False), (False, True), (False, False)], [[False], [False], []]),
    ],
)
def test_they_stay_if_all_do(wishes: list[Stays], found: list[list[bool]], slow_s: float) -> None:
    with watches(3) as ranks:
        assert stay(ranks, wishes, slow_s) == found


def test_who_trains_on_has_passed() -> None:
    with watches(2) as (first, second):
        late = Meeting(second)
        late.move(2)
        early = Meeting(first)
        early.move(1)
        assert early.stand(False) == PASSED
        early.leave()
        assert late.stand(False) == LEFT


def stand_ahead(meeting: Meeting, step: int) -> None:
    """Tell that this rank stands there, and do not look about yet."""
    meeting.move(step)
    meeting._stood = [meeting._stood[1], meeting._stood[1]._replace(step=step, number=1)]


def test_who_has_met_and_stands_at_the_next_place_was_here() -> None:
    """It asks first, trains a step, and waits there: it has not passed."""
    with watches(2) as (first, second):
        slow, fast = Meeting(first), Meeting(second)
        stand_ahead(slow, 1)
        fast.move(1)
        assert fast.stand(False) == MET, "it goes on before the slow one asks"
        fast.move(2)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(fast.stand, True)
            time.sleep(0.1)
            slow._stood = [slow._stood[0]] * 2
            assert slow.stand(False) == MET
            slow.move(2)
            assert slow.stand(False) == ENDS
            assert waiting.result() == ENDS


def test_a_rank_that_stood_and_has_closed_its_channel_still_counts() -> None:
    with watches(2) as (first, second):
        early, late = Meeting(first), Meeting(second)
        stand_ahead(late, 1)
        early.move(1)
        assert early.stand() == MET
        first.close(owner=True)
        late._stood = [late._stood[0]] * 2
        assert late.stand() == MET
        assert late.stand() == LEFT, "it comes to no further place"


def test_they_meet_again_at_a_later_stage() -> None:
    with watches(1) as (only,):
        meeting = Meeting(only)
        meeting.move(4)
        assert not meeting.alone
        meeting.part(together_from=Stage.EPOCH_END)
        assert meeting.alone
        meeting.stand()
        assert meeting.stands
        meeting.enter(Stage.EPOCH_END)
        assert not meeting.alone
        assert not meeting.stands
        meeting.part(together_from=Stage.FIT_END)
        meeting.move(5)
        assert not meeting.alone, "the next step is a new beginning"


def test_a_single_rank_and_ranks_that_cannot_be_asked() -> None:
    alone = Meeting(PeerWatch())
    assert alone.can_ask
    assert alone.stand(True) == ENDS
    switched_off = Meeting(PeerWatch([0, 1]))
    assert not switched_off.can_ask
    assert switched_off.stand(True) == ENDS


def test_who_does_not_come_is_waited_for_until_the_timeout() -> None:
    with watches(2, timedelta(seconds=0.5)) as (first, second):
        waiting, slow = Meeting(first), Meeting(second)
        slow.move(2)
        waiting.move(3)
        with pytest.raises(
            RuntimeError, match=r"waits for all others at step 3, .* rank 1 is at step 2"
        ):
            waiting.stand(False)
