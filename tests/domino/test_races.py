"""No buffer is read while it is in flight, shown by a channel that fills it with NaN."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from lightning_commfree.domino.layers import BACKWARD_TAG, FORWARD_TAG
from tests.domino.channels import Hasty, Poison
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
    )
]


def poisoned(channel: Any, cases: list[Case]) -> list[Outcome]:
    return [play(Poison(channel), case, gather=channel) for case in cases]


def hasty(channel: Any, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for tag, case in product((FORWARD_TAG, BACKWARD_TAG), cases):
        in_a_hurry = Hasty(Poison(channel), tag)
        outcomes.append(play(in_a_hurry, case, gather=channel))
        in_a_hurry.catch_up()
    return outcomes


def test_buffers_in_flight_are_not_read(tmp_path: Path) -> None:
    for outcomes in run_ranks(with_channel, 2, tmp_path, poisoned, (CASES,)):
        for case, outcome in zip(CASES, outcomes, strict=True):
            assert worst_error(outcome, reference(case)) < 1e-12, case


def test_a_skipped_wait_is_detected(tmp_path: Path) -> None:
    """The test above can fail, under every split and in both directions."""
    cases = [case for case in CASES if case.seed < 2]
    for outcomes in run_ranks(with_channel, 2, tmp_path, hasty, (cases,)):
        for case, outcome in zip(2 * cases, outcomes, strict=True):
            assert worst_error(outcome, reference(case)) == float("inf"), case
