"""Calls that the schedule would get wrong run without it, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.domino import DominoSettings, ParallelModel
from lightning_commfree.domino.splits import choose_split
from tests.domino.ranks import with_channel
from tests.fit.causal_lm import LENGTH, make, words
from tests.world import run_ranks

PREFIX = 7  # tokens that see each other in both directions; more than a chunk of the row


def masks() -> dict[str, Tensor]:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    prefix = causal.clone()
    prefix[..., :PREFIX, :PREFIX] = True
    additive = torch.zeros(prefix.shape).masked_fill(~prefix, torch.finfo(torch.float32).min)
    return {"causal": causal, "prefix": prefix, "additive prefix": additive}


def logits_of(model: Any, rows: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mask in masks().items():
        found[name] = model(input_ids=rows[:1], attention_mask=mask).logits
    found["both directions"] = model(input_ids=rows[:1], is_causal=False).logits
    first = model(input_ids=rows[:, :5], use_cache=True)
    found["no cache asked for"] = model(input_ids=rows).logits
    then = model(input_ids=rows[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    found["with a cache"] = then.logits
    return {name: logits.detach() for name, logits in found.items()}


def split_under_flash(parallel: ParallelModel) -> dict[str, str]:
    """Choose splits under flash attention, without running it: that needs a GPU."""
    config = parallel.sharding.sublayers[0].attention.config
    before, config._attn_implementation = config._attn_implementation, "flash_attention_2"
    row = torch.arange(LENGTH)[None]
    cases: dict[str, dict[str, Any]] = {
        "plain": {"position_ids": row},
        "no positions": {},
        "packed": {"position_ids": row % PREFIX},
        "packed by lengths": {"position_ids": row, "cu_seq_lens_q": torch.tensor([0, 3, LENGTH])},
    }
    hidden = torch.zeros(1, LENGTH, 8)
    args = parallel.settings, hidden
    found = {
        name: type(choose_split(*args, case, config, parallel.on_fallback)).__name__
        for name, case in cases.items()
    }
    config._attn_implementation = before
    return found


def divided(channel: Any) -> Any:
    model = make("gpt2").double()
    parallel = ParallelModel(model, channel, DominoSettings(None, "batch"))
    said: list[str] = []
    parallel.on_fallback = said.append
    found = logits_of(model, words(3).tensors[0])
    try:
        loss = model(input_ids=words(3).tensors[0]).logits.sum()
        torch.autograd.grad(loss, model.transformer.wpe.weight)
    except RuntimeError as error:
        found["grad"] = str(error)
    found["touched"] = [n for n, p in model.named_parameters() if p.grad is not None]
    try:
        model.save_pretrained("nowhere")
    except RuntimeError as error:
        found["save"] = str(error)
    parallel.on_fallback = lambda text: None
    found["flash"] = split_under_flash(parallel)
    parallel.unshard({})
    found["can save again"] = "save_pretrained" not in vars(model)
    return found, said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("two"), divided)


CASES = [*masks(), "both directions", "no cache asked for", "with a cache"]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(found: list[Any], case: str) -> None:
    """One row is not split by tokens without causal attention; a cache continues."""
    with torch.enable_grad():
        expected = logits_of(make("gpt2").double(), words(3).tensors[0])[case]
    for outcomes, _ in found:
        torch.testing.assert_close(outcomes[case], expected, rtol=0, atol=1e-10)


def test_fallbacks_are_reported(found: list[Any]) -> None:
    for _, said in found:
        assert [text.rpartition("using ")[2] for text in said] == [
            "`split='token'` for it.",
            "`split='none'` for it.",
            "`split='none'` for it.",
            "`split='none'` for it.",
        ]


def test_packed_rows_are_not_split_under_flash_attention(found: list[Any]) -> None:
    """It takes one list of starts for queries and keys, of which a chunk has fewer."""
    for outcomes, _ in found:
        assert outcomes["flash"] == {
            "plain": "TokenSplit",
            "no positions": "TokenSplit",
            "packed": "Split",
            "packed by lengths": "Split",
        }


def test_other_derivatives_are_refused(found: list[Any]) -> None:
    """The nested backward would add to the gradients of all parameters."""
    for outcomes, _ in found:
        assert "does not support `torch.autograd.grad`" in outcomes["grad"]
        assert outcomes["touched"] == []


def test_a_shard_is_not_exported(found: list[Any], tmp_path: Path) -> None:
    for outcomes, _ in found:
        assert "would write only this rank's shard. Call it after `fit`" in outcomes["save"]
        assert outcomes["can save again"]
