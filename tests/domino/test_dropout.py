"""Dropout: equal masks for full tensors, different ones for each rank's heads, reproducible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.domino.models import Case, Outcome, batch_for, make_for, seeded, step, worst_error
from tests.domino.ranks import divide, whole_gradients, with_channel
from tests.world import run_ranks

SHARED = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
OWN = {"gpt2": {"attn_pdrop": 0.3}, "llama": {"attention_dropout": 0.3}}
SPLITS = ("batch", "token", "weight", "none")
REPLAYED = [
    Case(kind, 3, split, 2, attention=attention)
    for kind, attention, splits in (
        ("gpt2", "eager", SPLITS),
        ("llama", "sdpa", ("batch", "token")),
    )
    for split in splits
]


class Step(NamedTuple):
    """One step on one rank."""

    outcome: Outcome
    masks: list[Tensor]  # of GPT-2's eager attention, by layer: where its weights are 0
    random: Tensor  # the shared generator's state afterwards


def all_of_them(kind: str) -> dict[str, float]:
    return {**(SHARED if kind == "gpt2" else {}), **OWN[kind]}


def play(channel: Any, case: Case, seed: int, dropout: dict[str, float]) -> Step:
    model = make_for(case, **dropout)
    parallel = divide(model, channel, case, seed)
    masks: list[Tensor] = []
    if case.kind == "gpt2":
        for block in list(model.transformer.h):
            block.attn.register_forward_hook(lambda *call: masks.append(call[-1][1] == 0))
    with seeded(11):
        loss, logits = step(model, case, batch_for(case))
        state = torch.get_rng_state()
    return Step(Outcome(loss, whole_gradients(parallel), logits), masks, state)


def play_all(channel: Any) -> dict[str, Any]:
    gathered = Case("gpt2", 3, "none", loss="gathered", attention="eager")
    return {
        "shared": [play(channel, replace(gathered, split=s), 0, SHARED) for s in SPLITS],
        "own": play(channel, gathered, 0, OWN["gpt2"]),
        "same": play(channel, gathered, 0, OWN["gpt2"]),
        "other": play(channel, gathered, 1, OWN["gpt2"]),
        "kept": [play(channel, case, 0, all_of_them(case.kind)) for case in REPLAYED],
        "again": [
            play(channel, replace(case, checkpoint=True), 0, all_of_them(case.kind))
            for case in REPLAYED
        ],
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results by rank."""
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("ranks"), play_all)


def test_ranks_draw_the_same_mask_for_full_tensors(played: list[dict[str, Any]]) -> None:
    """Logits and gradients are bit-equal on all ranks, and so are generators' states."""
    for one, other in zip(played[0]["shared"], played[1]["shared"], strict=True):
        assert torch.equal(one.outcome.logits, other.outcome.logits)
        assert torch.equal(one.random, other.random)
        assert worst_error(one.outcome, other.outcome) == 0


def test_without_a_split_dropout_equals_one_process(played: list[dict[str, Any]]) -> None:
    """The same masks in the same order: they are drawn once, after bias and sum."""
    case = Case("gpt2", 3, "none", loss="gathered", attention="eager")
    model = make_for(case, **SHARED)
    with seeded(11):
        loss, logits = step(model, case, batch_for(case))
        state = torch.get_rng_state()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for rank in played:
        found = rank["shared"][SPLITS.index("none")]
        assert worst_error(found.outcome, Outcome(loss, gradients, logits)) < 1e-12
        assert torch.equal(found.random, state)
    by_token = played[0]["shared"][SPLITS.index("token")]  # draws for one part, then for the other
    assert worst_error(by_token.outcome, Outcome(loss, gradients, logits)) > 1e-2


def test_attention_masks_differ_between_ranks(played: list[dict[str, Any]]) -> None:
    one, other = (rank["own"].masks for rank in played)
    assert len(one) == len(other) == 2  # layers
    for mine, theirs in zip(one, other, strict=True):
        assert mine.shape == theirs.shape
        behind = torch.ones(mine.shape[-2:], dtype=torch.bool).tril()
        assert 0.2 < mine[..., behind].double().mean() < 0.4  # 0.3 are dropped
        assert 0.2 < theirs[..., behind].double().mean() < 0.4
        assert not torch.equal(mine, theirs)
    assert not torch.equal(*one)  # and differently in each layer
    states = [rank["own"].random for rank in played]
    assert torch.equal(*states)  # the shared generator was not used


def test_attention_dropout_is_reproducible(played: list[dict[str, Any]]) -> None:
    for rank in played:
        own, same, other = (rank[name] for name in ("own", "same", "other"))
        assert worst_error(same.outcome, own.outcome) == 0
        assert all(torch.equal(a, b) for a, b in zip(own.masks, same.masks, strict=True))
        assert worst_error(other.outcome, own.outcome) > 1e-3
        assert not torch.equal(own.masks[0], other.masks[0])


@pytest.mark.parametrize("case", range(len(REPLAYED)), ids=lambda i: str(REPLAYED[i]))
def test_checkpointing_repeats_the_masks(played: list[dict[str, Any]], case: int) -> None:
    for rank in played:
        kept, again = rank["kept"][case], rank["again"][case]
        assert worst_error(again.outcome, kept.outcome) < 1e-13
        assert torch.equal(again.random, kept.random)
        assert len(again.masks) == 2 * len(kept.masks)  # computed again


def test_dropout_changes_every_outcome(played: list[dict[str, Any]]) -> None:
    """Otherwise the comparisons above would prove nothing."""
    for case, kept in zip(REPLAYED, played[0]["kept"], strict=True):
        loss, _ = step(make_for(case), case, batch_for(case))
        assert abs(loss - kept.outcome.loss) > 1e-3, case
