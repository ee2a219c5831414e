"""`split="auto"` takes what is fastest by its clock, on all ranks alike, and no digit changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.domino import DominoSettings, ParallelModel
from lightning_commfree.domino.auto_split import MOST_SIZES, ROUNDS, WARM_UP, SplitTrial
from tests.domino.models import make
from tests.domino.ranks import with_channel
from tests.world import run_ranks

PASSES = WARM_UP + ROUNDS
LENGTH = 6
WORDS = torch.randint(0, 11, (4, LENGTH), generator=torch.Generator().manual_seed(1))


@dataclass
class Clock:
    """A pass takes what its split costs; the first one of each ten times as much."""

    trial: SplitTrial
    costs: dict[str, float]
    time: float = 0.0
    calls: int = 0

    def __call__(self) -> float:
        assert self.trial.trying is not None, "nothing else is timed"
        self.calls += 1
        first = self.calls <= 4 * len(self.costs)
        self.time += self.costs[self.trial.trying] * (10 if first else 1)
        return self.time


def divided(channel: Any, costs: dict[str, float]) -> tuple[Any, ParallelModel, list[str]]:
    model = make("gpt2")
    parallel = ParallelModel(model, channel, DominoSettings())
    said: list[str] = []
    parallel.trial.now, parallel.trial.chosen = Clock(parallel.trial, costs), said.append
    return model, parallel, said


def train(model: Any, words: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=words, labels=words).loss
    loss.backward()
    return loss.detach()


def choices(parallel: ParallelModel) -> list[Any]:
    return parallel.trial.state_dict()["best"]


COSTS = {
    "none": {"none": 1.0, "batch": 2.0, "token": 3.0},
    "batch": {"none": 2.0, "batch": 1.0, "token": 3.0},
    "token": {"none": 2.0, "batch": 3.0, "token": 1.0},
}


def played(channel: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for winner, costs in COSTS.items():
        model, parallel, said = divided(channel, costs)
        losses = [train(model, WORDS[:2]) for _ in range(3 * PASSES)]
        early = choices(parallel)
        losses += [train(model, WORDS[:2]) for _ in range(2)]
        found[winner] = early, choices(parallel), said, losses, parallel.trial.now.calls

    # rank 0 finds rows the fastest, rank 1 finds them the slowest
    rows = 1.0 if channel.rank == 0 else 9.0
    model, parallel, _ = divided(channel, {"none": 3.0, "batch": rows, "token": 2.0})
    for _ in range(3 * PASSES + 1):
        train(model, WORDS[:2])
    found["apart"] = choices(parallel)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    found["seen"] = model(input_ids=WORDS[:2], attention_mask=mask).logits.detach()

    found["resumed"] = resumed(channel)
    found["sizes"] = sizes(channel)
    return found


def resumed(channel: Any) -> list[Any]:
    model, parallel, _ = divided(channel, COSTS["token"])
    for _ in range(7):
        train(model, WORDS[:2])
    with torch.no_grad():
        model(input_ids=WORDS[:2])
    state = parallel.trial.state_dict()

    model, again, said = divided(channel, COSTS["token"])
    again.trial.load_state_dict(state)
    for _ in range(3 * PASSES - 7 + 1):
        train(model, WORDS[:2])
    state = again.trial.state_dict()

    model, decided, _ = divided(channel, COSTS["none"])
    decided.trial.load_state_dict(state)
    train(model, WORDS[:2])
    return [said, choices(decided), decided.trial.now.calls]


def sizes(channel: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, parallel, _ = divided(channel, COSTS["token"])
    for turn in range(2 * PASSES + 1):  # one row: nothing or tokens
        train(model, WORDS[:1, : 5 + turn % 2])
    model(input_ids=WORDS[:1])  # without a backward
    found["one row"] = choices(parallel)
    many = torch.randint(0, 11, (MOST_SIZES + 2, LENGTH))
    for rows in range(2, MOST_SIZES + 3):
        train(model, many[:rows])
    found["tried"] = [tuple(size[:2]) for size in parallel.trial.state_dict()["seconds"]]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("auto"), played)


@pytest.mark.parametrize("winner", COSTS)
def test_the_fastest_is_taken_and_said(ranks: list[dict[str, Any]], winner: str) -> None:
    for found in ranks:
        early, late, (said,), _, calls = found[winner]
        assert early == []
        assert late == [(2, 8, winner)]
        assert f"batches of 2 x 8 tokens are split by {winner!r}" in said
        assert calls == 4 * 3 * PASSES, "nothing is timed after the choice"


def test_every_pass_of_the_trial_trains_on_the_same_loss(ranks: list[dict[str, Any]]) -> None:
    model = make("gpt2")
    expected = train(model, WORDS[:2]).double()  # transformers' own loss is in fp32
    for found in ranks:
        for winner in COSTS:
            for loss in found[winner][3]:
                torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)


def test_the_slowest_rank_counts(ranks: list[dict[str, Any]]) -> None:
    assert [found["apart"] for found in ranks] == [[(2, 8, "token")]] * 2


def test_tokens_are_not_split_where_one_sees_a_later_one(ranks: list[dict[str, Any]]) -> None:
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    expected = make("gpt2")(input_ids=WORDS[:2], attention_mask=mask).logits.detach()
    for found in ranks:
        torch.testing.assert_close(found["seen"], expected, rtol=0, atol=1e-10)


def test_a_resumed_trial_goes_on_and_a_choice_stays(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        (said,), chosen, calls = found["resumed"]
        assert "are split by 'token'" in said
        assert chosen == [(2, 8, "token")]
        assert calls == 0


def test_sizes_are_tried_apart_and_not_too_many(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sizes"]["one row"] == [(1, 8, "token")]
        assert len(found["sizes"]["tried"]) == MOST_SIZES
        assert found["sizes"]["tried"][:2] == [(1, 8), (2, 8)]


def test_a_model_on_one_rank_has_nothing_to_try(tmp_path: Path) -> None:
    (calls,) = run_ranks(with_channel, 1, tmp_path, alone)
    assert calls == 0


def alone(channel: Any) -> int:
    model, parallel, _ = divided(channel, COSTS["batch"])
    train(model, WORDS[:2])
    return parallel.trial.now.calls
