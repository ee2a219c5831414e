"""Gradients across ranks: mean over the data axis, shared key heads, norm of the full gradient."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger, ring_all_reduce_bytes
from lightning_commfree.domino import (
    GradientAverage,
    gradient_norm,
    sum_shared,
)
from lightning_commfree.domino.gradients import AVERAGE_TAG, NORM_TAG
from tests.cuda_walk import CPU, InstantChannel
from tests.domino.models import LAYERS, Case, batch_for, exact_loss, make_for, step
from tests.domino.ranks import divide, with_channel
from tests.world import run_ranks

EXACT = {"rtol": 1e-11, "atol": 1e-13}  # float64: sums in another order, and gradients near 0
Grads = dict[str, Tensor | None]
CASES = [
    Case("gpt2", 3),
    Case("gpt2 untied", 3, "token", frozen="layers"),
    Case("llama one key head", 2, "weight", checkpoint=True),
    Case("qwen3", 2, frozen="embeddings"),
]
WAYS = ["one", "two forwards", "accumulated"]


def losses(model: Any, case: Case, replica: int, way: str) -> None:
    """Backward over this replica's own batches."""
    first = replace(case, seed=1 + replica)
    second = replace(case, seed=5 + replica, rows=case.rows + 1)
    if way == "two forwards":
        loss = model(**batch_for(first)).loss + 2 * model(**batch_for(second)).loss
        loss.backward()
        return
    step(model, first, batch_for(first))


def weights_of(case: Case) -> Any:
    return make_for(replace(case, seed=0))


def average(tensor: Channel, data: Channel, case: Case, way: str, replica: int) -> dict[str, Any]:
    """One optimizer step's gradients on this rank, and what was sent for them."""
    model = weights_of(case)
    parallel = divide(model, tensor, case)
    mean = GradientAverage(data)
    parallel.done = mean.launch_sublayer
    if way == "accumulated":
        mean.active = False
        extra = replace(case, seed=20 + replica)
        step(model, extra, batch_for(extra))
        assert data.ledger.collectives == 0, "gradients that accumulate stay here"
        mean.active = True
    losses(model, case, replica, way)
    early = data.ledger.collectives_by_tag[AVERAGE_TAG]
    mean.land(model.parameters())
    sum_shared(parallel.sharding.specs, parallel.group)
    parts = {
        name: (p.grad, parallel.sharding.specs.get(p), p.requires_grad)
        for name, p in model.named_parameters()
    }
    return {
        "parts": parts,
        "early": early,
        "all": data.ledger.collectives_by_tag[AVERAGE_TAG],
        "bytes": data.ledger.bytes_by_tag[AVERAGE_TAG],
        "norm": gradient_norm(model.parameters(), parallel.sharding.specs, parallel.group),
        "rank": tensor.rank,
    }


def on_two_axes(rank: int, size: int, tensor_size: int, calls: list[tuple[Case, str]]) -> list[Any]:
    torch.set_num_threads(1)
    rows = [list(range(s, s + tensor_size)) for s in range(0, size, tensor_size)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    tensor = Channel.open(rows, rank, Ledger())
    data = Channel.open(columns, rank, Ledger())
    found = []
    for case, way in calls:
        data.ledger.collectives_by_tag.clear()
        data.ledger.bytes_by_tag.clear()
        found.append(average(tensor, data, case, way, rank // tensor_size))
    for channel in (tensor, data):
        channel.close()
    return found


def reference(case: Case, way: str, replicas: int) -> Grads:
    """One process: the mean over replicas of what each one's batches give."""
    total: Grads = {}
    for replica in range(replicas):
        model = weights_of(case)
        model.loss_function = exact_loss
        if way == "accumulated":
            extra = replace(case, seed=20 + replica)
            step(model, extra, batch_for(extra))
        losses(model, case, replica, way)
        for name, p in model.named_parameters():
            if p.grad is None:
                total[name] = None
            else:
                total[name] = total.get(name, 0) + p.grad / replicas
    return total


CALLS = [(case, way) for case in CASES for way in WAYS]


@pytest.fixture(scope="module", params=[(4, 2), (2, 2)], ids=str)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[list[dict[str, Any]]]]:
    """The number of replicas, and the results of each rank."""
    size, tensor_size = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return size // tensor_size, run_ranks(on_two_axes, size, folder, tensor_size, CALLS)


@pytest.mark.parametrize("call", range(len(CALLS)), ids=lambda i: f"{CALLS[i][0]} {CALLS[i][1]}")
def test_mean_and_norm(played: Any, call: int) -> None:
    """Of two replicas with other batches; also if sublayers are done twice before it lands.

    Each rank has its part of the mean; a key head that several ranks hold is whole on all of them.
    The norm counts every number once.
    """
    replicas, by_rank = played
    case, way = CALLS[call]
    expected = reference(case, way, replicas)
    norm = torch.stack([g.norm() for g in expected.values() if g is not None]).norm()
    for found in (results[call] for results in by_rank):
        assert found["parts"].keys() == expected.keys()
        for name, (gradient, spec, wanted) in found["parts"].items():
            whole = expected[name]
            assert (gradient is None) == (whole is None) == (not wanted), name
            if gradient is not None and whole is not None:
                part = whole if spec is None else spec.shard(whole, found["rank"])
                torch.testing.assert_close(
                    gradient, part, **EXACT, msg=lambda m, n=name: f"{n}: {m}"
                )
        torch.testing.assert_close(found["norm"], norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_launched_during_backward(played: Any, case: Case) -> None:
    """One message per sublayer that learns, one after backward: embedding, head, last norm."""
    replicas, by_rank = played
    for found in (results[CALLS.index((case, "one"))] for results in by_rank):
        sublayers = 2 * (LAYERS - (case.frozen == "layers"))
        if replicas == 1:
            assert found["early"] == found["all"] == found["bytes"] == 0
            continue
        assert found["early"] == sublayers
        assert found["all"] == sublayers + 1
        numel = sum(g.numel() for g, _, _ in found["parts"].values() if g is not None)
        assert found["bytes"] == ring_all_reduce_bytes(8 * numel, 2)  # float64


def naive_norms(channel: Any) -> list[Tensor]:
    """The norm; that of this rank's own gradients; nothing of a model without gradients."""
    case = Case("llama one key head", 2)
    model = make_for(case)
    parallel = divide(model, channel, case)
    nothing = gradient_norm(model.parameters(), parallel.sharding.specs, parallel.group)
    step(model, case, batch_for(case))
    sum_shared(parallel.sharding.specs, parallel.group)
    specs, gradients = parallel.sharding.specs, [p.grad for p in model.parameters()]
    everywhere = channel.all_reduce(sum(g.square().sum() for g in gradients).reshape(1), "t").wait()
    channel.ledger.collectives_by_tag.clear()
    norm = gradient_norm(model.parameters(), specs, parallel.group)
    assert channel.ledger.collectives_by_tag == {NORM_TAG: 1}
    own = torch.stack([g.norm() for g in gradients]).norm()
    return [norm, own, everywhere.sqrt().squeeze(), nothing]


def test_likely_mistakes_give_another_norm(tmp_path: Any) -> None:
    """A rank's own norm is too small, and the sum over ranks counts norms and keys twice."""
    (norm, own, everywhere, nothing), *others = run_ranks(with_channel, 2, tmp_path, naive_norms)
    assert own < 0.99 * norm
    assert everywhere > 1.01 * norm
    assert nothing == 0
    assert all(torch.equal(norm, other[0]) for other in others)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_bf16_gradients_are_summed_in_fp32(norm_type: float) -> None:
    """A norm in bf16 would be off by up to 2^-9."""
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (3, 500, 7)]
    for i, p in enumerate(parameters):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
    group: Any = SimpleNamespace(channel=InstantChannel(1, device=CPU), rank=0)
    group.all_reduce = group.channel.all_reduce
    exact = torch.cat([p.grad.double() for p in parameters if p.grad is not None])
    norm = gradient_norm(parameters, {}, group, norm_type)
    assert norm.dtype == torch.float32
    expected = torch.linalg.vector_norm(exact, norm_type)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    in_bf16 = torch.linalg.vector_norm(exact.bfloat16(), norm_type)
    assert abs(in_bf16.double() - expected) > 1e-4 * expected
