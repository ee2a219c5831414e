"""Cross entropy over a sharded vocabulary against torch's, in float64: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_commfree.domino import ShardSpec, TensorGroup
from lightning_commfree.domino.loss import LOSS_TAG, causal_lm_loss
from tests.domino.ranks import with_channel
from tests.world import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}  # float64: sums in another order
SIZES = [5, 8, 37]  # four ranks: the last holds padding only, none, some
ROWS, TOKENS = 3, 7


def logits_of(words: int, scale: float = 3.0) -> Tensor:
    torch.manual_seed(words)
    return scale * torch.randn(ROWS, TOKENS, words, dtype=torch.float64)


def labels_of(words: int, ignored: str) -> Tensor:
    torch.manual_seed(words + 1)
    labels = torch.randint(0, words, (ROWS, TOKENS))
    if ignored == "some":
        labels[torch.rand(ROWS, TOKENS) < 0.4] = -100
    if ignored == "all":
        labels[:] = -100
    return labels


def own_part(channel: Any, logits: Tensor) -> tuple[Tensor, int]:
    """This rank's logits; what a head makes of padding words is large, so that it would show."""
    spec = ShardSpec.even(logits.dim() - 1, logits.shape[-1], channel.size)
    part = spec.shard(logits, channel.rank)
    first = spec.ranges[channel.rank][0]
    part[..., max(logits.shape[-1] - first, 0) :] = 50.0
    return part.requires_grad_(), first


def play_causal(
    channel: Any, words: int, ignored: str, scale: float, more: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    part, first = own_part(channel, logits_of(words, scale))
    loss_function = causal_lm_loss(TensorGroup(channel), first, words)
    loss = loss_function(part, labels_of(words, ignored), vocab_size=words, **more)
    loss.backward()
    return loss.detach(), part.grad


def play_low(channel: Any, words: int) -> tuple[Tensor, Tensor, dict[str, int]]:
    part, first = own_part(channel, logits_of(words))
    low = part.detach().bfloat16().requires_grad_()
    channel.ledger.collectives_by_tag.clear()
    loss_function = causal_lm_loss(TensorGroup(channel), first, words)
    loss = loss_function(low, labels_of(words, "some"), vocab_size=words)
    loss.backward()
    return loss.detach(), low.grad, dict(channel.ledger.collectives_by_tag)


MORE: list[dict[str, Any]] = [
    {},
    {"num_items_in_batch": 11},
    {"num_items_in_batch": torch.tensor(11)},
    {"shift_labels": labels_of(37, "some").roll(2, 0)},
]
CAUSAL = [(words, "some", 3.0, {}) for words in SIZES]
CAUSAL += [(37, "none", 3.0, more) for more in MORE]
CAUSAL += [(37, "none", 1e4, {})]
CAUSAL += [(37, "none", 3.0, {"ignore_index": int(labels_of(37, "none")[0, 1])})]


def play_all(channel: Any) -> dict[str, list[Any]]:
    return {
        "causal": [play_causal(channel, *case) for case in CAUSAL],
        "low": [play_low(channel, 37)],
        "ignored": [play_causal(channel, 37, "all", 3.0, {"num_items_in_batch": 5})],
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Results of each rank."""
    return run_ranks(with_channel, 4, tmp_path_factory.mktemp("ranks"), play_all)


def assert_parts(gradients: list[Tensor], whole: Tensor) -> None:
    """Each rank's gradient is its part of the whole one; padding words get zeros."""
    spec = ShardSpec.even(whole.dim() - 1, whole.shape[-1], len(gradients))
    for rank, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, spec.shard(whole, rank), **EXACT)


@pytest.mark.parametrize("case", range(len(CAUSAL)))
def test_causal(played: list[Any], case: int) -> None:
    """Ignored labels, a given number of items, labels shifted already, and huge logits."""
    words, ignored, scale, more = CAUSAL[case]
    logits, labels = logits_of(words, scale).requires_grad_(), labels_of(words, ignored)
    items = more.get("num_items_in_batch")
    if "shift_labels" in more:
        scores, targets = logits.reshape(-1, words), more["shift_labels"].reshape(-1)
    else:
        scores, targets = logits[:, :-1].reshape(-1, words), labels[:, 1:].reshape(-1)
    how = {"reduction": "mean" if items is None else "sum"}
    expected = cross_entropy(scores, targets, **how, ignore_index=more.get("ignore_index", -100))
    expected = expected / (1 if items is None else int(items))
    expected.backward()
    assert expected.isfinite()
    for rank in played:
        torch.testing.assert_close(rank["causal"][case][0], expected.detach(), **EXACT)
    assert_parts([rank["causal"][case][1] for rank in played], logits.grad)


def test_bf16_logits_are_scored_in_float32(played: list[Any]) -> None:
    """As transformers does: rounding happens to logits and their gradients, not in between.

    Scored in bf16 the loss would be off by up to 2^-9 of it; one collective is all it takes.
    """
    logits = logits_of(37).bfloat16().requires_grad_()
    labels = labels_of(37, "some")
    expected = cross_entropy(logits.float()[:, :-1].reshape(-1, 37), labels[:, 1:].reshape(-1))
    expected.backward()
    spec = ShardSpec.even(2, 37, len(played))
    for rank, found in enumerate(played):
        ((loss, gradient, sent),) = found["low"]
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, spec.shard(logits.grad, rank), rtol=2**-7, atol=1e-6)
        assert sent == {LOSS_TAG: 1}


def test_labels_that_are_all_ignored(played: list[Any]) -> None:
    """With a number of items: nothing to learn, and no NaN."""
    for found in played:
        ((loss, gradient),) = found["ignored"]
        assert loss == 0
        assert gradient.abs().max() == 0
