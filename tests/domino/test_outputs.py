"""Outputs of a sharded model, and recovery from a failed forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.domino.models import Case, all_of_it_in, batch_for, exact_loss, make_for
from tests.domino.ranks import divide, with_channel
from tests.world import run_ranks

CASE = Case("gpt2", 3, padding="right")


def outputs(channel: Any) -> dict[str, Any]:
    """Outputs of the ways to request a loss."""
    model = make_for(CASE)
    divide(model, channel, CASE)
    batch = batch_for(CASE)
    words = batch.pop("input_ids")
    named = model(words, **batch)
    bare = model(words, **batch, return_dict=False)
    return {
        "keys": list(named),
        "logits": named.logits,
        "loss": named.loss.detach(),
        "bare": (bare[0].detach(), bare[1], len(bare)),
        "of seven": model(words, **batch, num_items_in_batch=7).loss.detach(),
        "without labels": list(model(words)),
    }


def failing(channel: Any) -> dict[str, Any]:
    """A norm raises in the middle of the stack, then a loss whose labels do not fit."""
    model = make_for(CASE)
    parallel = divide(model, channel, CASE)
    blocks = model.transformer.h
    real = list(blocks)
    batch = batch_for(CASE)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    handle = real[1].ln_2.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no"):
        model(**batch)
    handle.remove()
    lists = [all(a is b for a, b in zip(blocks, real, strict=True))]
    with pytest.raises(RuntimeError):
        model(batch["input_ids"], labels=batch["labels"][:, :-2])
    local = parallel.group.local_logits
    loss = model(**batch).loss
    loss.backward()
    lists.append(all(a is b for a, b in zip(blocks, real, strict=True)))
    return {
        "loss": loss.detach(),
        "blocks": lists,
        "slice": list(blocks[:2]) == real,
        "local": (local, parallel.group.local_logits),
        "scheduled": parallel.group.scheduled,
    }


def play_all(channel: Any) -> dict[str, Any]:
    return {"outputs": outputs(channel), "failing": failing(channel)}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results by rank."""
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("ranks"), play_all)


def plain_loss(**more: Any) -> torch.Tensor:
    model = make_for(CASE)
    if not more:
        model.loss_function = exact_loss
    with torch.no_grad(), all_of_it_in(model, torch.float64):
        loss: torch.Tensor = model(**batch_for(CASE), **more).loss
    return loss


def test_with_labels_there_are_no_logits(played: list[dict[str, Any]]) -> None:
    """One rank's logits could be mistaken for all of them; the other outputs are unchanged."""
    plain = make_for(CASE)(**batch_for(CASE))
    bare = make_for(CASE)(**batch_for(CASE), return_dict=False)
    for rank in played:
        found = rank["outputs"]
        assert found["keys"] == [key for key in plain if key != "logits"]
        assert found["logits"] is None
        torch.testing.assert_close(found["loss"], plain_loss(), rtol=1e-12, atol=0)
        loss, logits, length = found["bare"]
        assert loss == found["loss"]
        assert logits is None
        assert length == len(bare)
        assert "logits" in found["without labels"]


def test_items_in_the_batch_reach_the_loss(played: list[dict[str, Any]]) -> None:
    """As `transformers.Trainer` gives them for accumulation; its own loss is exact here, too."""
    expected = plain_loss(num_items_in_batch=7)
    assert abs(expected - plain_loss()) > 1
    for rank in played:
        torch.testing.assert_close(rank["outputs"]["of seven"], expected, rtol=1e-12, atol=0)


def test_a_failed_forward_leaves_no_trace(played: list[dict[str, Any]]) -> None:
    """Outside of a forward the list of blocks holds the blocks, and the next step is right."""
    for rank in played:
        found = rank["failing"]
        assert found["blocks"] == [True, True]
        assert found["slice"]
        assert found["local"] == (False, False)
        assert not found["scheduled"]
        torch.testing.assert_close(found["loss"], plain_loss(), rtol=1e-12, atol=0)
