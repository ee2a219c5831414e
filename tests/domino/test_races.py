"""No buffer is read while it is in flight, shown by a channel that fills it with NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.domino.layers import BACKWARD_TAG, FORWARD_TAG
from tests.domino.channels import Hasty, Poison, Watched
from tests.domino.models import Case, Outcome, reference, worst_error
from tests.domino.ranks import play, with_channel
from tests.world import run_ranks

CASES = [
    Case(kind, 3, split, 2, checkpoint, padding, loss=loss, seed=seed)
    for split in ("batch", "token", "weight", "hybrid", "none")
    for seed, kind, checkpoint, padding, loss in (
        (0, "gpt2", False, "none", "own"),
        (1, "llama one key head", True, "right", "own"),
        (2, "qwen3", False, "left", "gathered"),
        (2, "gpt2 untied", True, "none", "gathered"),
    )
]


def poisoned(channel: Any, cases: list[Case]) -> list[Outcome]:
    return [play(Poison(channel), case, gather=channel) for case in cases]


def hasty(channel: Any, tag: str, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        in_a_hurry = Hasty(Poison(channel), tag)
        outcomes.append(play(in_a_hurry, case, gather=channel))
        in_a_hurry.catch_up()
    return outcomes


def left_in_flight(channel: Any, cases: list[Case]) -> list[tuple[list[str], int]]:
    found = []
    for case in cases:
        watched = Watched(channel)
        play(watched, case, gather=channel)
        found.append((watched.in_flight, watched.most))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_buffers_in_flight_are_not_read(tmp_path: Path, size: int) -> None:
    for outcomes in run_ranks(with_channel, size, tmp_path, poisoned, (CASES,)):
        for case, outcome in zip(CASES, outcomes, strict=True):
            assert worst_error(outcome, reference(case)) < 1e-12, case


@pytest.mark.parametrize("tag", [FORWARD_TAG, BACKWARD_TAG])
def test_a_skipped_wait_is_detected(tmp_path: Path, tag: str) -> None:
    """The test above can fail, under every split and in both directions."""
    cases = [case for case in CASES if case.seed < 2]
    for outcomes in run_ranks(with_channel, 2, tmp_path, hasty, (tag, cases)):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert worst_error(outcome, reference(case)) == float("inf"), case


def test_nothing_is_in_flight_after_a_step(tmp_path: Path) -> None:
    """Several are in flight during it, but without a split."""
    for found in run_ranks(with_channel, 2, tmp_path, left_in_flight, (CASES,)):
        for case, (left, most) in zip(CASES, found, strict=True):
            assert left == [], case
            assert (most > 1) == (case.split != "none"), case
