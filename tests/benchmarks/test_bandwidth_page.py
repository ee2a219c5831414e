"""The page of the bandwidth tables, from made-up raw results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bandwidth import measure
from benchmarks.bandwidth.cells import Cell, cells
from benchmarks.bandwidth.chain import _verdict_of_steps, chain
from benchmarks.bandwidth.page import headline, page_lines, table
from tests.benchmarks.records import SETTINGS, record, stepped


def good() -> list[dict[str, Any]]:
    return [
        record("none", 300, 0),
        record("ddp", 2000, 8_010_000),
        record("diloco", 330, 81_000, 80_000),
        record("streaming", 330, 81_000, 80_000),
        record("overlap", 320, 81_000, 80_000),
        record("overlap_fp4", 306, 10_100, 10_000),
    ]


def test_the_headline_says_target_figure_and_verdict() -> None:
    assert headline(cells(good(), "100mbit"))[2:] == [
        "| step time / no communication, at most 1.03 | 1.02 | met |",
        "| DDP's step time / step time, at least 5 | 6.536 | met |",
        "| DDP's interface bytes / ours, at least 500 | 793.1 | met |",
        "| interface / ledger, within 3 % | 1.01 | met |",
    ]


def test_a_missed_target_is_said_to_be_missed() -> None:
    bad = [record("none", 300, 0), record("ddp", 600, 4_000_000)]
    bad.append(record("overlap_fp4", 320, 10_400, 10_000))
    verdicts = [line.split("|")[3].strip() for line in headline(cells(bad, "100mbit"))[2:]]
    assert verdicts == ["missed"] * 4
    assert "Not measured" in headline(cells(bad[:2], "100mbit"))[0]


def test_the_headline_has_the_step_time_step_by_step_too_where_steps_were_kept() -> None:
    """Ours is interrupted in two of three rounds, never in the same step twice."""
    rounds = [record("ddp", 600, 8_010_000, round_=i) for i in range(3)]
    rounds += [stepped("none", i, [10.0, 10.0], [9.0, 9.0]) for i in range(3)]
    for i, steps in enumerate([[10.2, 90.0], [50.0, 10.2], [10.2, 10.2]]):
        made = stepped("overlap_fp4", i, steps, [9.0, 9.0])
        for node in made["nodes"]:
            node |= {"wire_bytes": 20_000, "ledger_bytes": 20_000}
        rounds.append(made)
    lines = headline(cells(rounds, "100mbit"))
    assert lines[2] == "| step time / no communication, at most 1.03 | 3.01 | missed |"
    assert lines[3] == "| the same, step by step | 1.02 | met |"
    assert len(headline(cells(good(), "100mbit"))) == 6


def test_every_step_of_the_chain_has_its_verdict_and_equal_is_not_slower() -> None:
    found = cells([*good()[:-1], record("overlap_fp4", 321, 10_100, 10_000)], "100mbit")
    lines = chain(found)
    assert len(lines) == 4
    assert all(line.endswith("not slower holds.") for line in lines[:3])
    assert "1.0000 of its time" in lines[1]
    assert lines[3].endswith("1.0031 of its time; not slower does not hold.")


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([303, 380, 248], "0.9774 of its time (by round 0.800, 0.950, 1.010); not slower holds."),
        ([297, 396, 341], "1.1000 of its time (by round 0.990, 0.990, 1.100); not slower is not"),
        ([303, 396, 341], "1.1000 of its time (by round 0.990, 1.010, 1.100); not slower does not"),
    ],
)
def test_the_chain_takes_medians_and_shows_the_rounds(ours: list[float], words: str) -> None:
    rounds = [record("overlap", ms, 0, round_=i) for i, ms in enumerate([300, 400, 310])]
    rounds += [record("overlap_fp4", ms, 0, round_=i) for i, ms in enumerate(ours)]
    (line,) = chain(cells(rounds, "100mbit"))
    assert words in line


def test_rows_are_compared_over_the_rounds_in_which_one_call_measured_both() -> None:
    """The second call found the machine twice as slow, and measured one of the two rows alone."""
    calls = [
        {**record(row, ms, 0, round_=i), "call": call}
        for row, ms, i, call in [
            ("overlap", 300, 0, 0),
            ("overlap_fp4", 270, 0, 0),
            ("overlap", 300, 1, 0),
            ("overlap_fp4", 600, 1, 1),
            ("overlap_fp4", 600, 2, 1),
        ]
    ]
    (line,) = chain(cells(calls, "100mbit"))
    assert line.endswith("0.9000 of its time; not slower holds.")
    apart = [calls[2], calls[3]]
    (line,) = chain(cells(apart, "100mbit"))
    assert line.endswith("2.0000 of its time; not slower does not hold.")


def test_a_cell_is_the_median_over_rounds_of_the_slower_node() -> None:
    rounds = [record("none", ms, 0, round_=i) for i, ms in enumerate([300, 100, 900])]
    rounds += [record("ddp", 600, 8_010_000, round_=i) for i in range(3)]
    lines = table(cells(rounds, "100mbit"))
    assert lines[2] == "| no communication | 300.0 | 100.0 % | 0 | - | 3 |"
    assert lines[3] == "| DDP | 600.0 | 50.0 % | 8,010,000 | 4,000,000 (computed) | 3 |"


def test_step_by_step_an_interruption_falls_out_and_a_sync_stays() -> None:
    """Every round syncs in its last step and is interrupted in another; node 0 is slower."""
    rounds = []
    for i in range(3):
        steps = [10.0, 10.0, 10.0, 30.0]
        steps[i] = 500.0
        rounds.append(stepped("none", i, steps, [9.0] * 4))
    (cell,) = cells(rounds, "100mbit").values()
    assert isinstance(cell, Cell)
    assert cell.step_by_step_ms() == pytest.approx(15.0)
    assert table({"none": cell})[2].startswith("| no communication | 137.5 | 15.0 |")
    (cell,) = cells(rounds[:2], "100mbit").values()
    assert isinstance(cell, Cell)
    assert cell.step_by_step_ms() is None, "of two rounds a median is the mean"


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([11, 12, 13, 14], "step by step 1.2500 (1.2000 to 1.3000 with any one round left out);"
         " not slower does not hold."),
        ([8, 9, 9, 9.5], "(0.9000 to 0.9000 with any one round left out); not slower holds."),
        ([9, 9, 11, 11], "step by step 1.0000 (0.9000 to 1.1000 with any one round left out);"
         " not slower cannot be told: it turns with a round left out."),
    ],
)  # fmt: skip
def test_the_chain_is_judged_step_by_step_where_steps_were_kept(
    ours: list[float], words: str
) -> None:
    rounds = [stepped("overlap", i, [10.0, 10.0], [9.0, 9.0]) for i in range(4)]
    rounds += [stepped("overlap_fp4", i, [ms, ms], [1.0, 1.0]) for i, ms in enumerate(ours)]
    (line,) = chain(cells(rounds, "100mbit"))
    assert line.endswith(words)


def test_it_turns_too_where_all_rounds_together_are_on_the_other_side() -> None:
    """Of an even number of rounds a median lies between two of them, of one fewer on one."""
    turns = "cannot be told: it turns with a round left out"
    assert _verdict_of_steps(1.002, [0.991, 0.999]) == turns
    assert _verdict_of_steps(0.999, [1.001, 1.002]) == turns
    assert _verdict_of_steps(1.002, []) == "does not hold"


def test_what_a_row_takes_itself_is_of_the_node_that_came_last() -> None:
    """Node 0 waits 40 ms for node 1 in one round and the reverse in another; the link takes 6."""

    def held(row: str, i: int, link_ms: float) -> dict[str, Any]:
        made = stepped(row, i, [100.0, 100.0], [100.0, 100.0])
        for rank, node in enumerate(made["nodes"]):
            waits = 40.0 if rank == i % 2 else 0.0
            node["own_s"] = [0.0, (link_ms + waits) / 1e3]
        return made

    rounds = [held("overlap", i, 6.0) for i in range(2)]
    rounds += [held("overlap_fp4", i, 2.0) for i in range(2)]
    found = cells(rounds, "100mbit")
    assert [cell.own_ms() for cell in found.values()] == pytest.approx([3.0, 1.0])
    ours = (
        "for 1.00 ms a step (2 rounds), the other for 3.00 ms a step (2 rounds): by that it holds."
    )
    assert chain(found)[0].endswith(ours)
    head, _, first, _ = table(found)
    assert head.startswith("| | ms a step | own | utilization |")
    assert "| 100.0 | 3.0 | - |" in first
    found = {"overlap": found["overlap_fp4"], "overlap_fp4": found["overlap"]}
    assert chain(found)[0].endswith(
        "the other for 1.00 ms a step (2 rounds): by that it does not hold."
    )


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([5, 6, 6, 6], "by that it does not hold."),
        ([3, 3, 3, 9], "by that it holds."),
        ([3, 3, 6, 6], "by that it cannot be told: it turns with a round left out."),
    ],
)
def test_by_its_own_time_too_a_row_may_turn(ours: list[float], words: str) -> None:
    rounds = []
    for i, ms in enumerate(ours):
        for row, own in (("overlap", 4.0), ("overlap_fp4", ms)):
            made = stepped(row, i, [100.0] * 2, [100.0] * 2)
            for node in made["nodes"]:
                node["own_s"] = [own / 1e3] * 2
            rounds.append(made)
    (line,) = chain(cells(rounds, "100mbit"))
    assert line.endswith(words)


def test_what_threads_take_beside_the_training_is_of_the_node_with_more_of_it() -> None:
    rounds = []
    for row, seconds in [("overlap", [0.1, 0.9, 0.2]), ("overlap_fp4", [0.02, 0.03, 0.01])]:
        for i, beside_s in enumerate(seconds):
            made = record(row, 300, 0, round_=i)
            made["nodes"][0]["beside_s"] = beside_s / 2
            made["nodes"][1]["beside_s"] = beside_s
            rounds.append(made)
    found = cells(rounds, "100mbit")
    assert table(found)[0].startswith("| | ms a step | beside | utilization |")
    assert "| 300.0 | 2.0 | - |" in table(found)[2]
    (line,) = chain(found)
    assert line.endswith("its threads take 0.20 ms of CPU a step, the other's 2.00.")


def test_rounds_that_did_not_keep_their_steps_are_judged_by_their_means() -> None:
    rounds = [stepped("overlap", i, [10.0], [9.0]) for i in range(3)]
    rounds += [record("overlap_fp4", 110, 0, round_=i) for i in range(3)]
    (line,) = chain(cells(rounds, "100mbit"))
    assert "step by step" not in line
    assert line.endswith("not slower does not hold.")


def test_the_page_says_how_far_rounds_of_one_row_lie_apart() -> None:
    rounds = [record("none", ms, 0, round_=i) for i, ms in enumerate([300, 270, 310])]
    text = "\n".join(page_lines({"settings": SETTINGS, "records": rounds}, ["100mbit"]))
    assert "No communication itself took 270.0 to 310.0 ms by round" in text
    text = "\n".join(page_lines({"settings": SETTINGS, "records": rounds[:1]}, ["100mbit"]))
    assert "No communication itself" not in text


def test_a_row_that_failed_shows_its_error_and_no_figure() -> None:
    nodes = measure._failed("ddp_bf16", 8, "gloo has no bf16")
    raw = {"settings": SETTINGS, "records": good()}
    raw["records"].append({"rate": "100mbit", "row": "ddp_bf16", "round": 0, "nodes": nodes})
    (line,) = [line for line in page_lines(raw, ["100mbit"]) if "bf16 hook" in line]
    assert line == "| DDP, bf16 hook | did not run: gloo has no bf16 | | | | |"


def test_a_round_that_failed_does_not_take_the_others_away() -> None:
    failed = measure._failed("none", 40, "a peer was lost")
    rounds = [record("none", 300, 0, round_=1)]
    rounds.append({"rate": "100mbit", "row": "none", "round": 0, "nodes": failed})
    cell = cells(rounds, "100mbit")["none"]
    assert isinstance(cell, Cell)
    assert list(cell.ms_by_round) == [(None, 1)]


def test_utilization_is_of_the_rounds_that_both_rows_have() -> None:
    """The machine is twice as slow in three rounds in which fp4 does not run."""
    rounds = [record("none", ms, 0, round_=i) for i, ms in enumerate([300, 300, 600, 600, 600])]
    rounds += [record("overlap_fp4", 400, 0, round_=i) for i in range(2)]
    found = cells(rounds, "100mbit")
    assert [line.split("|")[3] for line in table(found)[2:]] == [" 100.0 % ", " 75.0 % "]


def test_the_page_says_how_long_the_windows_were() -> None:
    rounds = [stepped("none", 0, [10.0] * 8, [9.0] * 8), stepped("ddp", 0, [10.0], [9.0])]
    rounds.append(stepped("overlap", 0, [10.0] * 8, [9.0] * 8))
    lines = page_lines({"settings": SETTINGS, "records": rounds}, ["100mbit"])
    assert [line for line in lines if line.startswith("- A window")] == [
        "- A window of 8 steps: no communication, + overlap 5.",
        "- A window of 1 steps: DDP.",
    ]
