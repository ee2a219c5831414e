"""bf16 autocast: errors against float64 are as large as those of one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.domino.layers import BACKWARD_TAG, FORWARD_TAG
from tests.domino.channels import Deaf
from tests.domino.models import Case, Outcome, batch_for, make_for, reference
from tests.domino.ranks import divide, whole_gradients, with_channel
from tests.world import run_ranks

CASES = [
    Case(kind, 3, split, 2, dtype=torch.float32)
    for kind, splits in (
        ("gpt2", ("batch", "token", "weight", "none")),
        ("llama", ("token", "weight")),
        ("qwen3", ("weight", "none")),
        ("llama one key head", ("batch", "none")),
    )
    for split in splits
]


def run(model: Any, case: Case) -> Any:
    """Forward under autocast and backward outside of it, as Lightning does."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch_for(case)).loss
    loss.backward()
    return loss.detach()


def play(channel: Any, case: Case, gather: Any = None) -> Outcome:
    model = make_for(case)
    parallel = divide(model, channel, case)
    loss = run(model, case)
    parallel.group.channel = gather or channel
    return Outcome(loss, whole_gradients(parallel))


def forgetful(channel: Any) -> list[Outcome]:
    return [
        play(Deaf(channel, tag), case, channel)
        for tag, case in product((FORWARD_TAG, BACKWARD_TAG), CASES)
    ]


def play_all(channel: Any) -> list[tuple[Outcome, Outcome]]:
    """Without and with activation checkpointing."""
    return [(play(channel, case), play(channel, replace(case, checkpoint=True))) for case in CASES]


def alone(case: Case) -> Outcome:
    model = make_for(case)
    loss = run(model, case)
    return Outcome(loss, {name: p.grad for name, p in model.named_parameters()})


def exact(case: Case) -> Outcome:
    return reference(replace(case, split="batch", dtype=torch.float64))


def distance(outcome: Outcome, expected: Outcome) -> float:
    """The norm of the difference of all gradients, relative to theirs."""
    assert outcome.gradients.keys() == expected.gradients.keys()
    difference, size = 0.0, 0.0
    for name, whole in expected.gradients.items():
        found = outcome.gradients[name]
        assert found is not None
        assert whole is not None
        assert found.dtype == torch.float32
        difference += (found.double() - whole).square().sum().item()
        size += whole.square().sum().item()
    return (difference / size) ** 0.5


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[Outcome, Outcome]]]:
    """Results by rank."""
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("ranks"), play_all)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_those_of_one_process(
    played: list[list[tuple[Outcome, Outcome]]], case: Case
) -> None:
    """Rounding happens elsewhere, so errors differ, but have the same size.

    A bf16 number has 8 bits, an error of at most 2^-9 each; a sum that is left out is off by far
    more than half as much again, see below.
    """
    plain = distance(alone(case), exact(case))
    assert 1e-3 < plain < 5e-2  # autocast it is
    for results in played:
        kept, again = results[CASES.index(case)]  # checkpointing changes nothing
        assert 1e-3 < distance(kept, exact(case)) < 1.5 * plain
        assert abs(kept.loss - exact(case).loss) < 2e-2
        assert again.loss == kept.loss
        for name, gradient in kept.gradients.items():
            assert torch.equal(gradient, again.gradients[name]), name


def test_a_skipped_all_reduce_exceeds_rounding(tmp_path: Path) -> None:
    for outcomes in run_ranks(with_channel, 2, tmp_path, forgetful):
        for case, outcome in zip(2 * CASES, outcomes, strict=True):
            assert distance(outcome, exact(case)) > 10 * distance(alone(case), exact(case)), case
