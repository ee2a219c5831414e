"""The chaos bench: its schedule, and its figures from logs written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.events import KILL, MEETING, SLOW, STOP, Event, schedule
from benchmarks.chaos.fit import arrived
from benchmarks.chaos.goodput import (
    Commits,
    Window,
    all_out,
    available_s,
    longest_standstill,
    losses,
    outages,
    seconds_to,
    useful_steps,
)
from benchmarks.chaos.job import Outcome
from benchmarks.chaos.page import Runs, body, draw, figures_of, opening
from benchmarks.chaos.plan import DDP, FOLDER, Plan, Process, Row


def process(pid: int, ready_s: float, *rows: tuple[float, float, float]) -> Process:
    """A process from its rows without steps: seconds, useful steps, and those kept."""
    first = Row(ready_s, 0, 0.0, 0.0)
    return Process([first, *(Row(at, round(u), u, k) for at, u, k in rows)], pid)


WINDOW = Window(100.0, 120.0)
LOGS = {
    # 18 steps in the window
    0: [process(10, 95.0, (100.0, 2, 0), (106.0, 8, 6), (109.0, 9, 8), (120.0, 20, 18))],
    # killed with 4 of its 6 steps kept; its successor is ready after 5 s and has 6 steps
    1: [
        process(11, 95.0, (99.0, 1, 0), (106.0, 6, 4)),
        process(12, 111.0, (113.0, 1, 0), (120.0, 6, 2)),
    ],
    # stopped for 4 s, and its process survives
    2: [process(13, 96.0, (100.0, 1, 0), (108.0, 9, 8), (112.5, 10, 8), (120.0, 17, 8))],
}
EVENTS = [Event(6.0, KILL, 1, 0.0), Event(8.0, STOP, 2, 4.0), Event(9.0, MEETING, -1, 2.0)]


def test_useful_steps_are_those_of_the_living_and_what_the_dead_have_shared() -> None:
    assert useful_steps(LOGS, WINDOW, {10, 12, 13}) == 18 + (4 - 1) + 6 + 16
    assert useful_steps(LOGS, WINDOW, {10, 13}) == 18 + (4 - 1) + 2 + 16, "the successor died too"


def test_a_replica_is_out_until_its_successor_is_ready_or_it_continues() -> None:
    out = outages(LOGS, EVENTS, WINDOW)
    assert out == {0: [], 1: [Window(106.0, 111.0)], 2: [Window(108.0, 112.0)]}
    assert available_s(out, WINDOW) == 3 * 20 - 5 - 4
    assert not all_out(out)
    assert all_out({**out, 0: [Window(107.0, 109.0)]})
    assert longest_standstill(LOGS, out, WINDOW) == pytest.approx(11.0), "109 to 120 on replica 0"

    # the same stop, but the method ends the process; its successor never gets ready
    gone = {**LOGS, 2: [process(13, 96.0, (100.0, 1, 0), (108.0, 9, 8), (112.5, 10, 8))]}
    assert outages(gone, EVENTS, WINDOW)[2] == [Window(108.0, 120.0)]
    # a second event while it is out
    again = [*EVENTS, Event(7.0, SLOW, 1, 6.0)]
    assert outages(LOGS, again, WINDOW)[1] == [Window(106.0, 111.0)]


def test_losses_are_joins_pauses_and_steps_that_were_not_sent() -> None:
    out = outages(LOGS, EVENTS, WINDOW)
    found = losses(LOGS, out, WINDOW, {10, 12, 13}, rate=1.0)
    assert found.joining_s == 113 - 111
    assert found.unsent_s == 6 - 4
    pauses = [6, 11, 6, 7, 8, 7.5]  # longer than 3 steps, by replica; the time of a step is none
    assert found.still_s == pytest.approx(sum(pauses) - len(pauses))


def test_the_page_says_which_criteria_are_met(tmp_path: Path) -> None:
    calm_logs = {r: [process(r, 95.0, (100.0, 0, 0), (120.0, 20, 10))] for r in range(3)}
    calm = Outcome(WINDOW, [], [], calm_logs, {0, 1, 2}, tmp_path)
    rough = Outcome(WINDOW, EVENTS, ["1.0 s  SIGKILL"], LOGS, {10, 12, 13}, tmp_path)
    curve = [(5.0 * i, 6.0 - i) for i in range(4)]
    runs = {
        FOLDER: Runs(calm, rough, curve, [(1.05 * at, loss) for at, loss in curve]),
        DDP: Runs(calm, rough, curve, curve[:2]),
    }
    found = {method: figures_of(method, one) for method, one in runs.items()}
    assert found[FOLDER].rate == pytest.approx(1.0)
    assert found[FOLDER].goodput == pytest.approx(43 / 51)
    assert found[FOLDER].share == pytest.approx(43 / 60)
    assert found[FOLDER].ratio == pytest.approx(1.05)
    assert found[DDP].ratio is None
    page = "\n".join(opening(found, {"torchft": "it did not train"}, "x.png"))
    assert f"| goodput of {FOLDER} | 84.3 % | at least 95 % | missed |" in page
    assert "over undisturbed | 1.05 | at most 1.05 (published" in page
    assert page.count("| met |") == 1
    assert "torchft has no figures: it did not train" in page
    plan = Plan("", {}, 0.1, 20, 40, 2.0, 1.0, "", [], 0.0)
    text = body(runs, plan, "100mbit", 1, 5.0, schedule(1, 20.0))
    assert "1.0 s  SIGKILL" in text
    assert sum(f"Where {FOLDER} loses 8.0 of 51 available" in line for line in text) == 1
    draw(runs, found, tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_the_seconds_to_a_loss_are_interpolated_between_moving_means() -> None:
    curve = [(10.0 * i, 9.0 - i) for i in range(7)]  # means: 8 at 10 s to 4 at 50 s
    assert seconds_to(curve, 6.0) == pytest.approx(30.0)
    assert seconds_to(curve, 5.5) == pytest.approx(35.0)
    assert seconds_to(curve, 8.5) == 10.0
    assert seconds_to(curve, 3.9) is None
    assert seconds_to(curve[:2], 8.5) is None, "too few for a mean"


def test_of_a_killed_process_the_launches_that_have_landed_survive() -> None:
    launches = [[20, 40], [30, 50]]  # by fragment
    assert arrived(range(1, 20), [[], []]) == 0
    assert arrived(range(1, 22), [[20], []]) == (20 + 0) / 2
    assert arrived(range(1, 56), launches) == (40 + 50) / 2
    assert arrived(range(51, 56), [[], [50]]) == 0, "a joiner's own steps only"


def test_of_a_process_that_came_back_the_launches_in_which_it_took_part_count() -> None:
    positions = [*range(1, 33), *range(50, 53)]  # it skipped the launches after steps 30 and 40
    assert arrived(positions, [[20], [50]]) == (20 + 33) / 2


def test_steps_that_a_failed_commit_discards_are_not_useful() -> None:
    count = Commits(parts=2, delay=1)
    count.steps = 10
    count.synced(0, committed=True)
    assert (count.useful, count.kept) == (10, 4.5), "9 steps of one fragment"
    count.steps = 20
    count.synced(1, committed=False)
    assert count.useful == 10, "all 20 steps of half the model"
    assert count.kept == 10 - (11 + 0) / 2
    count.steps = 23
    count.replaced()
    assert count.useful == count.kept == 9 / 2, "what the first commit has sent"
