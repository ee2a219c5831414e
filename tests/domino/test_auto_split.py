"""`split="auto"` chooses the fastest split by its clock, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_commfree.domino import DominoSettings, ParallelModel
from lightning_commfree.domino.auto_split import MAX_SIZES, PASSES, WARM_UP, Size, SplitTrial
from tests.domino.models import make
from tests.domino.ranks import with_channel
from tests.world import run_ranks

OF_EACH = WARM_UP + PASSES  # passes of a split
LENGTH = 6
WORDS = torch.randint(0, 11, (4, LENGTH), generator=torch.Generator().manual_seed(1))


@dataclass
class Clock:
    """A pass takes the cost of its split; the first pass of each split takes ten times as much."""

    costs: dict[str, float]
    split: str = ""
    time: float = 0.0
    calls: int = 0

    @classmethod
    def into(cls, trial: SplitTrial, costs: dict[str, float]) -> Clock:
        """Replace a trial's clock by one that knows which split it times."""
        clock, timed = cls(costs), trial.timed

        def remembered(run: Any, name: str, hidden: Tensor) -> Any:
            clock.split = name
            return timed(run, name, hidden)

        trial.now, trial.timed = clock, remembered  # type: ignore[method-assign]
        return clock

    def __call__(self) -> float:
        self.calls += 1
        first = self.calls <= 2 * len(self.costs)
        self.time += self.costs[self.split] * (10 if first else 1)
        return self.time


def divided(channel: Any, costs: dict[str, float]) -> tuple[Any, ParallelModel, list[str]]:
    model = make("gpt2")
    parallel = ParallelModel(model, channel, DominoSettings())
    said: list[str] = []
    Clock.into(parallel.trial, costs)
    parallel.trial.on_choice = said.append
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
        losses = [train(model, WORDS[:2]) for _ in range(3 * OF_EACH)]
        early = choices(parallel)
        losses += [train(model, WORDS[:2]) for _ in range(2)]
        found[winner] = early, choices(parallel), said, losses, parallel.trial.now.calls

    # rank 0 finds rows the fastest, rank 1 finds them the slowest
    rows = 1.0 if channel.rank == 0 else 9.0
    model, parallel, _ = divided(channel, {"none": 3.0, "batch": rows, "token": 2.0})
    for _ in range(3 * OF_EACH + 1):
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
    for _ in range(3 * OF_EACH - 7 + 1):
        train(model, WORDS[:2])
    state = again.trial.state_dict()

    model, decided, _ = divided(channel, COSTS["none"])
    decided.trial.load_state_dict(state)
    train(model, WORDS[:2])
    return [said, choices(decided), decided.trial.now.calls]


def sizes(channel: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, parallel, _ = divided(channel, COSTS["token"])
    for turn in range(2 * OF_EACH + 1):  # one row: nothing or tokens
        train(model, WORDS[:1, : 5 + turn % 2])
    model(input_ids=WORDS[:1])  # without a backward
    found["one row"] = choices(parallel)
    many = torch.randint(0, 11, (MAX_SIZES + 2, LENGTH))
    for rows in range(2, MAX_SIZES + 3):
        train(model, many[:rows])
    found["tried"] = [tuple(size[:2]) for size in parallel.trial.state_dict()["seconds"]]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("auto"), played)


@pytest.mark.parametrize("winner", COSTS)
def test_the_fastest_split_is_chosen_and_reported(ranks: list[dict[str, Any]], winner: str) -> None:
    for found in ranks:
        early, late, (said,), _, calls = found[winner]
        assert early == []
        assert late == [(2, 8, winner)]
        assert f"chose {winner!r} for batches of 2 x 8 tokens" in said
        assert calls == 2 * 3 * OF_EACH, "nothing is timed after the choice"


def test_every_pass_of_the_trial_trains_on_the_same_loss(ranks: list[dict[str, Any]]) -> None:
    model = make("gpt2")
    expected = train(model, WORDS[:2]).double()  # transformers' own loss is in fp32
    for found in ranks:
        for winner in COSTS:
            for loss in found[winner][3]:
                torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)


def test_the_slowest_rank_counts(ranks: list[dict[str, Any]]) -> None:
    assert [found["apart"] for found in ranks] == [[(2, 8, "token")]] * 2


def test_tokens_are_not_split_without_causal_attention(ranks: list[dict[str, Any]]) -> None:
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    expected = make("gpt2")(input_ids=WORDS[:2], attention_mask=mask).logits.detach()
    for found in ranks:
        torch.testing.assert_close(found["seen"], expected, rtol=0, atol=1e-10)


def test_a_resumed_trial_continues_and_a_choice_persists(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        (said,), chosen, calls = found["resumed"]
        assert "chose 'token' for batches of" in said
        assert chosen == [(2, 8, "token")]
        assert calls == 0


def test_each_size_has_a_trial_up_to_a_limit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sizes"]["one row"] == [(1, 8, "token")]
        assert len(found["sizes"]["tried"]) == MAX_SIZES
        assert found["sizes"]["tried"][:2] == [(1, 8), (2, 8)]


class Echo:
    """A channel to a rank with the same timings."""

    size, device = 2, torch.device("cpu")

    def all_gather(self, mine: Tensor, tag: str) -> Any:
        return Gathered(torch.stack([mine, mine]))


@dataclass
class Gathered:
    all_ranks: Tensor

    def wait(self) -> Tensor:
        return self.all_ranks


class Still:
    """A pass that computes nothing."""

    def forward(self, hidden: Tensor, arguments: Any) -> Tensor:
        return hidden

    backward = staticmethod(lambda gradient: gradient)


def chosen_among(costs: dict[str, list[float]]) -> str:
    """Return the choice where the timed passes of each split cost this much, one by one."""
    trial, time = SplitTrial(cast(Any, Echo())), 0.0
    trial.now = lambda: time
    passes = {name: iter([99.0, *each]) for name, each in costs.items()}  # the warm-up first
    hidden = torch.zeros(2, 8, 1)
    while (turn := trial.choose(Size(2, 8), lambda: list(costs)))[1]:
        run = trial.timed(cast(Any, Still()), turn[0], hidden)
        run.forward(hidden, [])
        time += next(passes[turn[0]])  # between forward and backward: the loss counts
        run.backward(hidden)
    return turn[0]


def test_the_median_pass_decides() -> None:
    """Four disturbed passes of nine change nothing, though they make the mean larger."""
    disturbed = (PASSES // 2) * [9.0] + (PASSES - PASSES // 2) * [1.0]
    assert chosen_among({"none": PASSES * [1.1], "batch": disturbed}) == "batch"


def test_an_illegal_split_is_not_timed() -> None:
    """A mask of a later batch may forbid the split whose turn it is."""
    trial = SplitTrial(cast(Any, Echo()))
    hidden = torch.zeros(2, 8, 1)
    assert trial.choose(Size(2, 8), lambda: ["none", "batch", "token"]) == ("none", True)
    for name in ("none", "batch"):
        run = trial.timed(cast(Any, Still()), name, hidden)
        run.forward(hidden, [])
        run.backward(hidden)
    assert trial.choose(Size(2, 8), lambda: ["none", "batch"]) == ("none", False)
    assert trial.choose(Size(2, 8), lambda: ["none", "batch", "token"]) == ("token", True)
