"""The sharded modules alone, without a schedule, against plain torch: outputs and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_commfree.comm.channel import Pending
from lightning_commfree.domino import ShardSpec, TensorGroup
from lightning_commfree.domino.layers import (
    BACKWARD_TAG,
    FORWARD_TAG,
    ColumnLinear,
    DropoutAfterSum,
    RowLinear,
    VocabEmbedding,
    VocabHead,
)
from tests.domino.ranks import with_channel
from tests.world import run_ranks

WORDS, WIDTH, OUT = 7, 6, 12  # 7 words: two and three ranks pad
EXACT = {"rtol": 1e-12, "atol": 1e-13}  # float64: sums in another order


class Run(NamedTuple):
    """Output, gradient of the input, gradients of weight and bias."""

    output: Tensor
    d_input: Tensor | None
    d_weight: Tensor
    d_bias: Tensor | None


def linear(transposed: bool, bias: bool) -> Any:
    torch.manual_seed(3)
    if transposed:
        layer: Any = Conv1D(OUT, WIDTH)
        nn.init.normal_(layer.bias)
    else:
        layer = nn.Linear(WIDTH, OUT, bias)
    return layer.double()


def embedding(padding: int | None) -> nn.Embedding:
    torch.manual_seed(4)
    return nn.Embedding(WORDS, WIDTH, padding_idx=padding).double()


def inputs(width: int = WIDTH) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(2, 5, width, dtype=torch.float64)


def words() -> Tensor:
    return torch.tensor([[0, 6, 3, 3], [5, 1, 6, 2]])


def run(layer: Any, x: Tensor, pick: Any = None) -> Run:
    """Forward and backward; what comes back differs from number to number."""
    wants = x.is_floating_point()
    x = x.clone().requires_grad_(wants)
    seen = x if pick is None else pick(x)
    output = layer(seen)
    torch.manual_seed(6)
    output.backward(torch.randn_like(output))
    bias = getattr(layer, "bias", None)
    d_bias = None if bias is None else bias.grad
    return Run(output.detach(), x.grad, layer.weight.grad, d_bias)


def parameter(spec: ShardSpec | None, value: Tensor | None, rank: int) -> Any:
    if value is None:
        return None
    return nn.Parameter(
        value.detach().clone() if spec is None else spec.shard(value.detach(), rank)
    )


def play_columns(channel: Any, transposed: bool, bias: bool) -> Run:
    group, rank, plain = TensorGroup(channel), channel.rank, linear(transposed, bias)
    spec, flat = (
        ShardSpec.even(int(transposed), OUT, channel.size),
        ShardSpec.even(0, OUT, channel.size),
    )
    weight, own_bias = parameter(spec, plain.weight, rank), parameter(flat, plain.bias, rank)
    layer = ColumnLinear(weight, own_bias, group, transposed)
    x = inputs().requires_grad_()
    output = layer(x)
    torch.manual_seed(6)
    whole = torch.randn(*x.shape[:-1], OUT, dtype=torch.float64)
    output.backward(whole.chunk(channel.size, -1)[rank])
    return Run(output.detach(), x.grad, weight.grad, None if bias is False else own_bias.grad)


def play_rows(channel: Any, transposed: bool, bias: bool) -> Run:
    group, rank, plain = TensorGroup(channel), channel.rank, linear(transposed, bias)
    spec = ShardSpec.even(int(not transposed), WIDTH, channel.size)
    weight = parameter(spec, plain.weight, rank)
    layer = RowLinear(weight, parameter(None, plain.bias, rank), group, transposed)
    return run(layer, inputs(), lambda x: x.chunk(channel.size, -1)[rank])


def play_words(channel: Any, padding: int | None) -> Run:
    spec = ShardSpec.even(0, WORDS, channel.size)
    weight = parameter(spec, embedding(padding).weight, channel.rank)
    first = spec.ranges[channel.rank][0]
    layer = VocabEmbedding(weight, first, TensorGroup(channel), padding)
    return run(layer, words())


def head_of(channel: Any, bias: bool) -> tuple[VocabHead, ShardSpec]:
    torch.manual_seed(7)
    plain = nn.Linear(WIDTH, WORDS, bias).double()
    spec = ShardSpec.even(0, WORDS, channel.size)
    weight = parameter(spec, plain.weight, channel.rank)
    own = parameter(spec, plain.bias, channel.rank)
    return VocabHead(weight, own, WORDS, TensorGroup(channel)), spec


def play_head(channel: Any, bias: bool) -> Run:
    return run(head_of(channel, bias)[0], inputs())


def play_local_head(channel: Any) -> tuple[Tensor, dict[str, int]]:
    """This rank's logits, and the collectives they took."""
    head, _ = head_of(channel, True)
    head.group.local_logits = True
    channel.ledger.collectives_by_tag.clear()
    return head(inputs()).detach(), dict(channel.ledger.collectives_by_tag)


def play_many(channel: Any, calls: list[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    return [function(channel, *arguments) for function, arguments in calls]


KINDS = [(False, True), (False, False), (True, True)]  # transposed, bias


@pytest.fixture(scope="module", params=[1, 2, 3])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of each rank for a call; `played(function, *arguments)`."""
    calls: list[Any] = [(f, kind) for f in (play_columns, play_rows) for kind in KINDS]
    calls += [(play_words, (padding,)) for padding in (None, 3, 6)]
    calls += [(play_head, (bias,)) for bias in (True, False)] + [(play_local_head, ())]
    folder = tmp_path_factory.mktemp("ranks")
    by_rank = run_ranks(with_channel, request.param, folder, play_many, (calls,))
    return lambda *call: [results[calls.index((call[0], call[1:]))] for results in by_rank]


@pytest.mark.parametrize(("transposed", "bias"), KINDS)
def test_columns(played: Any, transposed: bool, bias: bool) -> None:
    runs = played(play_columns, transposed, bias)
    expected = run(linear(transposed, bias), inputs())
    size = len(runs)
    for rank, found in enumerate(runs):
        torch.testing.assert_close(found.output, expected.output.chunk(size, -1)[rank], **EXACT)
        torch.testing.assert_close(found.d_input, expected.d_input, **EXACT)
        part = expected.d_weight.chunk(size, int(transposed))[rank]
        torch.testing.assert_close(found.d_weight, part, **EXACT)
        if bias:
            torch.testing.assert_close(found.d_bias, expected.d_bias.chunk(size)[rank], **EXACT)


@pytest.mark.parametrize(("transposed", "bias"), KINDS)
def test_rows(played: Any, transposed: bool, bias: bool) -> None:
    """The bias is added once: its gradient and the output would show it."""
    runs = played(play_rows, transposed, bias)
    expected = run(linear(transposed, bias), inputs())
    size = len(runs)
    d_input = sum(found.d_input for found in runs)  # each rank has read its columns only
    torch.testing.assert_close(d_input, expected.d_input, **EXACT)
    for rank, found in enumerate(runs):
        torch.testing.assert_close(found.output, expected.output, **EXACT)
        part = expected.d_weight.chunk(size, int(not transposed))[rank]
        torch.testing.assert_close(found.d_weight, part, **EXACT)
        if bias:
            torch.testing.assert_close(found.d_bias, expected.d_bias, **EXACT)


@pytest.mark.parametrize("padding", [None, 3, 6])
def test_words(played: Any, padding: int | None) -> None:
    """A padding word gets no gradient, whichever rank holds it."""
    runs = played(play_words, padding)
    expected = run(embedding(padding), words())
    spec = ShardSpec.even(0, WORDS, len(runs))
    for rank, found in enumerate(runs):
        torch.testing.assert_close(
            found.output, expected.output, rtol=0, atol=0
        )  # only zeros added
        torch.testing.assert_close(found.d_weight, spec.shard(expected.d_weight, rank), **EXACT)
    assert padding is None or expected.d_weight[padding].abs().max() == 0


@pytest.mark.parametrize("bias", [True, False])
def test_head(played: Any, bias: bool) -> None:
    """Logits of all words on all ranks, of an odd vocabulary."""
    runs = played(play_head, bias)
    torch.manual_seed(7)
    expected = run(nn.Linear(WIDTH, WORDS, bias).double(), inputs())
    spec = ShardSpec.even(0, WORDS, len(runs))
    for rank, found in enumerate(runs):
        torch.testing.assert_close(found.output, expected.output, **EXACT)
        torch.testing.assert_close(found.d_input, expected.d_input, **EXACT)
        torch.testing.assert_close(found.d_weight, spec.shard(expected.d_weight, rank), **EXACT)
        if bias:
            torch.testing.assert_close(found.d_bias, spec.shard(expected.d_bias, rank), **EXACT)


def test_head_with_local_logits_sends_nothing(played: Any) -> None:
    torch.manual_seed(7)
    expected = nn.Linear(WIDTH, WORDS).double()(inputs()).detach()
    runs = played(play_local_head)
    spec = ShardSpec.even(2, WORDS, len(runs))
    for rank, (local, sent) in enumerate(runs):
        torch.testing.assert_close(local, spec.shard(expected, rank), **EXACT)
        assert sent == {}


class Alone:
    """A channel of one rank that records tags."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.tags: list[str] = []

    def all_reduce(self, tensor: Tensor, tag: str) -> Any:
        self.tags.append(tag)
        return Pending.here(tensor)


def test_under_a_schedule_linears_leave_sums_to_it() -> None:
    channel = Alone()
    group = TensorGroup(channel)  # type: ignore[arg-type]
    plain = linear(False, True)
    column = ColumnLinear(plain.weight, plain.bias, group)
    row = RowLinear(plain.weight, plain.bias, group)
    dropout = DropoutAfterSum(1.0, group)
    x = inputs()
    with group.under_schedule():
        run(column, x)
        partial = row(x)
        torch.testing.assert_close(partial, x @ plain.weight.T, **EXACT)
        torch.testing.assert_close(row.finish(partial), plain(x), **EXACT)
        assert dropout(x) is x
        assert dropout.finish(x).abs().max() == 0
    assert channel.tags == []
    assert dropout(x).abs().max() == 0  # and without a schedule all of it
    run(column, x)
    row(x)
    assert channel.tags == [BACKWARD_TAG, FORWARD_TAG]
