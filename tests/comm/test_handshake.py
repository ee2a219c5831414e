"""Ranks that mean different jobs are told so, all alike; agreement costs 32 bytes a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import TAG, check_agreement
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes
from tests.world import run_ranks

SIZE = 3
DIGEST_BYTES = 32
FACTS = {"sync_every": "100", "wire_dtype": "'fp4'", "weight": "float32 [4, 3]", "bias": "für"}


def told_apart(rank: int, size: int, cases: list[list[dict[str, str]]]) -> list[Any]:
    """For every case: what this rank is told ("" for agreement), and what it sent for it."""
    ledger = Ledger()
    channel = Channel.open([list(range(size))], rank, ledger)
    outcomes = []
    for facts_by_rank in cases:
        before = ledger.totals()
        try:
            check_agreement(channel, facts_by_rank[rank])
            text = ""
        except ValueError as error:
            text = str(error)
        after = ledger.totals()
        assert set(ledger.bytes_by_tag) == {TAG, "peers"}
        sent = after.bytes_sent - before.bytes_sent, after.collectives - before.collectives
        outcomes.append((text, *sent))
    return outcomes


def second_half_disagrees(rank: int, size: int) -> str:
    channel = Channel.open([[0, 1], [2, 3]], rank, Ledger())
    try:
        check_agreement(channel, {"x": str(rank if rank > 1 else 0)})
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the ranks were told in each case; all must have been told the same and sent alike."""
    other_setting = {**FACTS, "sync_every": "50"}
    one = {f"p{i}": "float32 [1]" for i in range(8)}
    cases = {
        "other order": [FACTS, dict(reversed(FACTS.items())), FACTS],
        "many": [{f"parameter_{i}": "float32 [4096, 4096]" for i in range(500)}] * SIZE,
        "none": [{}] * SIZE,
        "setting": [FACTS, FACTS, other_setting],
        "shape": [FACTS, {**FACTS, "weight": "float32 [3, 4]"}, FACTS],
        "parameters": [
            FACTS,
            {name: text for name, text in FACTS.items() if name != "bias"},
            {**FACTS, "head": "float32 [2]"},
        ],
        "odd first": [other_setting, FACTS, FACTS],
        "eight": [one, dict.fromkeys(one, "float32 [2]"), one],
        "agreed": [FACTS, FACTS, FACTS],
    }
    folder = tmp_path_factory.mktemp("ranks")
    ranks = run_ranks(told_apart, SIZE, folder, list(cases.values()))
    assert [text for text, *_ in ranks[0]] == [text for text, *_ in ranks[1]]
    assert [text for text, *_ in ranks[0]] == [text for text, *_ in ranks[2]]
    for outcomes in ranks:
        for text, *sent in outcomes:
            assert text or sent == [all_gather_bytes(DIGEST_BYTES, SIZE), 1], "a digest and no more"
    return {name: text for name, (text, *_) in zip(cases, ranks[0], strict=True)}


def test_ranks_that_agree_are_told_nothing(told: dict[str, str]) -> None:
    assert told["other order"] == told["many"] == told["none"] == ""
    assert told["agreed"] == "", "after a refusal the channel still works"


def test_a_difference_names_ranks_and_values_and_nothing_else(told: dict[str, str]) -> None:
    assert "do not agree: sync_every is 50 on rank 2, 100 on rank 0. Start" in told["setting"]
    assert "wire_dtype" not in told["setting"]
    assert "rank 1" not in told["setting"]
    shape = "do not agree: weight is float32 [3, 4] on rank 1, float32 [4, 3] on rank 0."
    assert shape in told["shape"]
    assert "bias is absent on rank 1, für on rank 0" in told["parameters"]
    assert "head is float32 [2] on rank 2, absent on rank 0" in told["parameters"]
    for rank in (1, 2):
        assert f"sync_every is 100 on rank {rank}, 50 on rank 0" in told["odd first"]


def test_many_differences_are_counted(told: dict[str, str]) -> None:
    named = [f"p{i}" for i in range(8) if f"p{i} is" in told["eight"]]
    assert named == ["p0", "p1", "p2", "p3", "p4"]
    assert "; and 3 more. Start every" in told["eight"]


def test_one_rank_agrees_with_itself_and_sends_nothing() -> None:
    ledger = Ledger()
    check_agreement(Channel([0], 0, ledger), FACTS)
    assert ledger.totals() == Ledger().totals()


def test_the_error_names_global_ranks(tmp_path: Path) -> None:
    told = run_ranks(second_half_disagrees, 4, tmp_path)
    assert told[0] == told[1] == ""
    assert told[2] == told[3]
    assert "x is 3 on rank 3, 2 on rank 2" in told[2]
