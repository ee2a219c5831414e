"""The schedule against tables by hand, and what holds for every H, P and tau."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_commfree.diloco.schedule import Pace, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sync_every = draw(st.integers(1, 24))
    num_fragments = draw(st.integers(1, 2 * sync_every))  # also more fragments than steps
    return Schedule(sync_every, num_fragments, draw(st.integers(0, sync_every - 1)))


@st.composite
def changed_schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    """Return a schedule with up to three changes of pace, and a step beyond the last one."""
    num_fragments = draw(st.integers(1, 20))  # also more than steps
    overlap = draw(st.integers(0, 6))
    schedule = Schedule(draw(st.integers(overlap + 2, 16)), num_fragments, overlap)
    for _ in range(draw(st.integers(1, 3))):
        begins = schedule.begins
        for _ in range(draw(st.integers(1, 3))):
            begins = schedule.next_launch_of(0, begins)
        sync_every = draw(st.integers(schedule.overlap_steps + 2, 16))
        overlap = draw(st.integers(0, sync_every - 2))
        schedule = schedule.changed(Pace(begins, sync_every, overlap))
    return schedule, schedule.begins + 60


def launches_of(schedule: Schedule, fragment: int, last_step: int) -> list[int]:
    steps = range(1, last_step + 1)
    return [step for step in steps if fragment in schedule.launched_at(step)]


def landings_of(schedule: Schedule, fragment: int, last_step: int) -> list[int]:
    return [step for step in range(1, last_step + 1) if fragment in schedule.landed_at(step)]


def test_four_steps_two_fragments_overlap_one_by_hand() -> None:
    schedule = Schedule(sync_every=4, num_fragments=2, overlap_steps=1)
    launched = {4: [0], 6: [1], 8: [0], 10: [1], 12: [0]}
    landed = {5: [0], 7: [1], 9: [0], 11: [1], 13: [0]}
    for step in range(14):
        assert schedule.launched_at(step) == launched.get(step, []), step
        assert schedule.landed_at(step) == landed.get(step, []), step
    assert schedule.complete_after == 7


def test_the_example_of_the_paper() -> None:
    """Section 2.2: fragments leave 50 steps apart, the first after a whole cycle."""
    schedule = Schedule(sync_every=100, num_fragments=2, overlap_steps=1)
    assert launches_of(schedule, 0, 400) == [100, 200, 300, 400]
    assert launches_of(schedule, 1, 400) == [150, 250, 350]
    assert landings_of(schedule, 0, 400) == [101, 201, 301]
    assert landings_of(schedule, 1, 400) == [151, 251, 351]


def test_offsets_are_rounded_down_where_fragments_do_not_divide_the_cycle() -> None:
    """10 / 4 = 2.5: neither 0, 3, 5, 8 (rounded) nor a cycle of another length (0, 2, 4, 6)."""
    schedule = Schedule(sync_every=10, num_fragments=4, overlap_steps=0)
    assert [schedule.offset(p) for p in range(4)] == [0, 2, 5, 7]


def test_more_fragments_than_steps_leave_several_at_once() -> None:
    schedule = Schedule(sync_every=2, num_fragments=5, overlap_steps=1)
    assert [schedule.offset(p) for p in range(5)] == [0, 0, 0, 1, 1]
    assert [schedule.launched_at(step) for step in range(1, 6)] == [
        [],
        [0, 1, 2],
        [3, 4],
        [0, 1, 2],
        [3, 4],
    ]
    assert schedule.landed_at(4) == [3, 4]


@given(schedules())
def test_each_fragment_leaves_after_a_whole_cycle_and_then_once_per_cycle(
    schedule: Schedule,
) -> None:
    cycle = schedule.sync_every
    for p in range(schedule.num_fragments):
        first = cycle + schedule.offset(p)
        assert launches_of(schedule, p, 4 * cycle) == list(range(first, 4 * cycle + 1, cycle))


@given(schedules())
def test_a_launched_fragment_lands_overlap_steps_later(schedule: Schedule) -> None:
    for step in range(1, 3 * schedule.sync_every + 1):
        assert schedule.landed_at(step + schedule.overlap_steps) == schedule.launched_at(step)
        if step <= schedule.sync_every:  # what would be launched before the first step
            assert schedule.landed_at(step) == [] or step - schedule.overlap_steps >= 1


@given(schedules(), st.lists(st.integers(0, 60), max_size=3), st.integers(0, 120))
def test_the_next_launch_is_the_first_step_at_which_anything_leaves(
    schedule: Schedule, joined: list[int], step: int
) -> None:
    schedule = replace(schedule, joined=tuple(joined))
    found = schedule.next_launch(step)
    assert schedule.launched_at(found)
    assert found > step
    assert not any(schedule.launched_at(between) for between in range(step + 1, found))


def test_the_next_launch_may_be_far_away() -> None:
    """Steps were tried one after the other, which took minutes at the end of such a fit."""
    assert Schedule(10**9, 4, 1).next_launch(20) == 10**9


@given(schedules())
def test_offsets_spread_the_fragments_over_one_cycle(schedule: Schedule) -> None:
    """Any `sync_every` consecutive steps after the first cycle launch every fragment once."""
    cycle, start = schedule.sync_every, 2 * schedule.sync_every
    launched = [p for step in range(start, start + cycle) for p in schedule.launched_at(step)]
    assert sorted(launched) == list(range(schedule.num_fragments))
    counts = [len(schedule.launched_at(step)) for step in range(start, start + cycle)]
    assert max(counts) - min(counts) <= 1, "no step has more to send than another by two"


@given(schedules())
def test_complete_after_is_the_last_first_landing(schedule: Schedule) -> None:
    landings = range(schedule.num_fragments)
    last = 2 * schedule.sync_every + schedule.overlap_steps
    assert schedule.complete_after == max(landings_of(schedule, p, last)[0] for p in landings)


@pytest.mark.parametrize("overlap_steps", [0, 1, 5])
def test_launched_and_landed_fragments_come_in_ascending_order(overlap_steps: int) -> None:
    """All ranks launch in this order, so it must not depend on anything but the step."""
    schedule = Schedule(sync_every=6, num_fragments=20, overlap_steps=overlap_steps)
    for step in range(1, 30):
        for fragments in (schedule.launched_at(step), schedule.landed_at(step)):
            assert fragments == sorted(fragments)


@given(changed_schedules())
def test_after_changes_of_pace_every_fragment_lands_before_it_leaves_again(
    case: tuple[Schedule, int],
) -> None:
    schedule, last = case
    paces = schedule.paces
    for p in range(schedule.num_fragments):
        launches = launches_of(schedule, p, last)
        overlaps = [[one.overlap_steps for one in paces if one.begins < at][-1] for at in launches]
        landings = [at + tau for at, tau in zip(launches, overlaps, strict=True)]
        assert landings_of(schedule, p, last) == [at for at in landings if at <= last]
        # a fragment leaves before others land in the same step
        assert all(lands < leaves for lands, leaves in zip(landings, launches[1:], strict=False))
        longest = max(one.sync_every for one in paces)
        gaps = [after - at for at, after in zip(launches, launches[1:], strict=False)]
        assert max(gaps) <= 2 * longest, "no fragment is forgotten"
        assert [schedule.launches_until(p, at) for at in launches] == [*range(1, len(launches) + 1)]
        after = [schedule.next_launch_of(p, at) for at in [0, *launches[:-1]]]
        assert after == launches

        firsts = {min(at for at in launches if at > one.begins) for one in paces[1:]}
        for number, at in enumerate(launches):
            until = launches[number + 1] if number + 1 < len(launches) else last + 1
            assert schedule.is_first_at_pace(p, until - 1) == (at in firsts), (p, at)


@given(changed_schedules())
def test_fragments_leave_and_land_in_turn(case: tuple[Schedule, int]) -> None:
    """Flight F is of fragment F mod P, and flights land in order: elastic jobs count them."""
    schedule, last = case
    steps = range(1, last + 1)
    for fragments in (
        [p for step in steps for p in schedule.launched_at(step)],
        [p for step in steps for p in schedule.landed_at(step)],
    ):
        assert fragments == [turn % schedule.num_fragments for turn in range(len(fragments))]


@given(changed_schedules())
def test_a_pace_begins_with_a_launch_of_fragment_0_and_is_what_it_says(
    case: tuple[Schedule, int],
) -> None:
    schedule, last = case
    launches = launches_of(schedule, 0, last)
    ends = [one.begins for one in schedule.paces[1:]] + [last]
    overlap = 0
    for pace, end in zip(schedule.paces, ends, strict=True):
        own = [at for at in launches if pace.begins < at <= end]
        together = schedule.num_fragments > pace.sync_every
        later = max(overlap - pace.overlap_steps, int(together)) if pace.begins else 0
        first = pace.begins + later + pace.sync_every
        assert own == [*range(first, end + 1, pace.sync_every)]
        overlap = pace.overlap_steps
    before = schedule.before
    assert before is not None
    for step in range(1, schedule.begins + 1):
        assert schedule.launched_at(step) == before.launched_at(step)
        assert schedule.landed_at(step) == before.landed_at(step)
    assert schedule.next_launch(last) == min(
        schedule.next_launch_of(p, last) for p in range(schedule.num_fragments)
    )
    assert schedule.next_landing(0) == schedule.next_launch(0) + schedule.paces[0].overlap_steps
