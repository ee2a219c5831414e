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


def texts(cases: list[list[dict[str, str]]], folder: Path) -> list[str]:
    """Return what the ranks were told, case by case; all must have been told the same."""
    told = [[text for text, *_ in outcomes] for outcomes in run_ranks(told_apart, 3, folder, cases)]
    assert told[0] == told[1] == told[2]
    return told[0]


def test_agreement_costs_a_digest_and_nothing_else(tmp_path: Path) -> None:
    other_order = dict(reversed(FACTS.items()))
    many = {f"parameter_{i}": "float32 [4096, 4096]" for i in range(500)}
    cases = [[FACTS, other_order, FACTS], [many] * SIZE, [{}] * SIZE]
    for outcomes in run_ranks(told_apart, SIZE, tmp_path, cases):
        assert outcomes == [("", all_gather_bytes(DIGEST_BYTES, SIZE), 1)] * len(cases)


def test_a_difference_names_ranks_and_values(tmp_path: Path) -> None:
    other_setting = {**FACTS, "sync_every": "50"}
    other_shape = {**FACTS, "weight": "float32 [3, 4]"}
    without_bias = {name: text for name, text in FACTS.items() if name != "bias"}
    with_extra = {**FACTS, "head": "float32 [2]"}
    cases = [
        [FACTS, FACTS, other_setting],
        [FACTS, other_shape, FACTS],
        [FACTS, without_bias, with_extra],
        [other_setting, FACTS, FACTS],
        [FACTS, FACTS, FACTS],
    ]
    setting, shape, parameters, odd_first, agreed = texts(cases, tmp_path)
    assert "do not agree: sync_every is 50 on rank 2, 100 on rank 0. Start every" in setting
    assert "do not agree: weight is float32 [3, 4] on rank 1, float32 [4, 3] on rank 0." in shape
    assert "bias is absent on rank 1, für on rank 0" in parameters
    assert "head is float32 [2] on rank 2, absent on rank 0" in parameters
    assert "sync_every is 100 on rank 1, 50 on rank 0" in odd_first
    assert "sync_every is 100 on rank 2, 50 on rank 0" in odd_first
    assert agreed == "", "after a refusal the channel still works"


def test_what_agrees_is_not_named(tmp_path: Path) -> None:
    (text,) = texts([[FACTS, FACTS, {**FACTS, "sync_every": "50"}]], tmp_path)
    assert "wire_dtype" not in text
    assert "rank 1" not in text


def test_many_differences_are_counted(tmp_path: Path) -> None:
    one = {f"p{i}": "float32 [1]" for i in range(8)}
    two = {f"p{i}": "float32 [2]" for i in range(8)}
    (text,) = texts([[one, two, one]], tmp_path)
    named = [f"p{i}" for i in range(8) if f"p{i} is" in text]
    assert named == ["p0", "p1", "p2", "p3", "p4"]
    assert "; and 3 more. Start every" in text


@pytest.mark.parametrize("fingerprint", [{}, FACTS])
def test_one_rank_agrees_with_itself_and_sends_nothing(fingerprint: dict[str, str]) -> None:
    ledger = Ledger()
    check_agreement(Channel([0], 0, ledger), fingerprint)
    assert ledger.totals() == Ledger().totals()


def test_the_error_names_global_ranks(tmp_path: Path) -> None:
    told = run_ranks(second_half_disagrees, 4, tmp_path)
    assert told[0] == told[1] == ""
    assert told[2] == told[3]
    assert "x is 3 on rank 3, 2 on rank 2" in told[2]
