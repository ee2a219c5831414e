"""A module with sharded models inside: its parameters, full states and shards of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.domino import (
    DominoSettings,
    ShardedModule,
    ShardSpec,
    check_batch,
    gradient_norm,
)
from tests.domino.models import Case, batch_for, make
from tests.domino.ranks import with_channel
from tests.world import run_ranks

KINDS = ("gpt2", "llama one key head", "qwen3", "gemma3", "olmo", "phi3", "qwen3 moe")
CASE = Case(rows=4)
SIZE = 2


class Around(nn.Module):
    """A user's module: a model inside, a layer beside it, a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lm = make(kind)
        torch.manual_seed(1)
        self.beside = nn.Linear(3, 3).double()
        self.register_buffer("count", torch.arange(4))

    def loss(self) -> Tensor:
        loss: Tensor = self.lm(**batch_for(CASE)).loss
        return loss + self.beside.weight.square().sum()


def train(module: Around, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        module.loss().backward()
        optimizer.step()
    return optimizer


def held_as(spec: ShardSpec | None) -> str:
    """In full; a shard of this rank's alone; or one whose gradients several ranks sum."""
    return "full" if spec is None else "summed" if spec.overlapping else "shard"


def seen(channel: Any, kind: str) -> dict[str, Any]:
    """A rank's tensors, gathered states and shards of them over two steps."""
    module = Around(kind)
    before = {name: p.detach().clone() for name, p in module.state_dict().items()}
    sharded = ShardedModule.prepare(module, channel, DominoSettings())
    found: dict[str, Any] = {"before": before}
    found["held"] = [
        (name, held_as(sharded.specs.get(p)), p.shape) for name, p in module.named_parameters()
    ]

    module.loss().backward()
    sharded.sum_shared_gradients()
    found["norm"] = gradient_norm(module.parameters(), sharded.specs, sharded.models[0].group)
    module.zero_grad()
    whole = sharded.full_state_dict(keep=True)
    found["untouched"] = {name: value.clone() for name, value in whole.items()}

    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        module.loss().backward()
        sharded.sum_shared_gradients()
        optimizer.step()
    whole = sharded.full_state_dict(keep=True)
    state = sharded.full_optimizer_state(optimizer, keep=True)
    found |= {
        "whole": whole,
        "state": state,
        "nothing": sharded.full_state_dict(keep=False),
    }

    # shards of the full states equal the rank's own
    own = {name: value.clone() for name, value in module.state_dict().items()}
    parts = sharded.shard_state_dict(whole)
    found["parts"] = all(torch.equal(parts[name], value) for name, value in own.items())
    part = sharded.shard_optimizer_state(optimizer, state)["state"]
    mine = optimizer.state_dict()["state"]
    found["optimizer's parts"] = part.keys() == mine.keys() and all(
        torch.equal(part[i][key], mine[i][key]) for i in mine for key in mine[i]
    )

    sharded.join()
    found["joined"] = module.state_dict()
    left = sharded.optimizer_shards.full_state_dict(optimizer, channel, keep=True)
    found["left"] = all(
        torch.equal(left["state"][i][key], state["state"][i][key]) for i in mine for key in mine[i]
    )
    return found


@pytest.fixture(scope="module", params=KINDS)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, run_ranks(with_channel, SIZE, folder, seen, (request.param,))


def test_held_tensors(found: Any) -> None:
    """Every parameter keeps its name; only shards are smaller than the full tensors."""
    kind, ranks = found
    plain = dict(Around(kind).named_parameters())
    for rank in ranks:
        assert [name for name, *_ in rank["held"]] == list(plain)
        kinds = {name: held for name, held, _ in rank["held"]}
        assert kinds["beside.weight"] == "full"
        for name, held, shape in rank["held"]:
            assert (held == "full") <= (shape == plain[name].shape), name
            assert (held == "shard") <= (shape.numel() < plain[name].numel()), name
        summed = {name for name, held in kinds.items() if held == "summed"}
        norms = ("q_norm", "k_norm")
        expected = dict.fromkeys(("qwen3", "qwen3 moe", "gemma3"), norms)
        expected["llama one key head"] = ("k_proj", "v_proj")
        assert summed == {name for name in plain if any(k in name for k in expected.get(kind, ()))}


def test_full_states_equal_one_process(found: Any) -> None:
    kind, ranks = found
    module = Around(kind)
    module.loss().backward()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in module.parameters() if p.grad is not None]
    )
    module.zero_grad()
    state = train(module).state_dict()
    for rank in ranks:
        assert rank["nothing"] == {}
        torch.testing.assert_close(rank["norm"], norm, rtol=1e-6, atol=0)  # the loss is in float32
        for name, value in rank["before"].items():
            assert torch.equal(rank["untouched"][name], value), name
        for name, value in module.state_dict().items():
            assert rank["whole"][name].shape == value.shape
            torch.testing.assert_close(rank["whole"][name], value, rtol=0, atol=0.01)
            assert torch.equal(rank["joined"][name], rank["whole"][name]), name
        shapes = {i: {k: v.shape for k, v in own.items()} for i, own in state["state"].items()}
        assert shapes == {
            i: {k: v.shape for k, v in own.items()} for i, own in rank["state"]["state"].items()
        }


def test_shards_of_full_states_equal_the_originals(found: Any) -> None:
    """And an optimizer's shards can be gathered after the models are joined."""
    for rank in found[1]:
        assert rank["parts"]
        assert rank["optimizer's parts"]
        assert rank["left"]


def other_batches(channel: Any) -> str:
    check_batch(channel, "train", {"same": torch.ones(2), "nested": [torch.ones(3)]})
    with pytest.raises(ValueError, match="must train on the same batch") as refusal:
        check_batch(channel, "train", {"other": torch.full((2,), float(channel.rank))})
    return str(refusal.value)


def test_different_batches_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(with_channel, SIZE, tmp_path, other_batches):
        assert "the first batches of ranks [0, 1] differ" in text
