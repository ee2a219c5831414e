"""Nodes of several ranks: full precision inside, one vote between, each rank with its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree import DistributedLion, DistributedLionStrategy
from lightning_commfree.lion import buckets
from tests.lion.serial import SerialLion
from tests.strategies.models import Recorder, Tiny, assert_same, dataset, quiet_trainer, rank_loader
from tests.world import run_ranks

STEPS = 20
BATCH = 2
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), **SETTINGS)


class Thawing(Voter):
    """Unfreezes its head when DDP has been told what to average."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.head.requires_grad_(True)


def thaw(rank: int, size: int, node_size: int) -> str:
    strategy = DistributedLionStrategy(node_size=node_size)
    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=2)
    try:
        trainer.fit(Thawing(), rank_loader(2 * BATCH * size, BATCH, rank, size))
    except RuntimeError as error:
        return str(error)
    return ""


def fit(rank: int, size: int, node_size: int, **settings: Any) -> dict[str, Any]:
    recorder = Recorder()
    strategy = DistributedLionStrategy(node_size=node_size, **settings)
    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=STEPS, callbacks=[recorder])
    trainer.fit(Voter(), rank_loader(STEPS * BATCH * size, BATCH, rank, size))
    state = trainer.optimizers[0].state.values()
    return {
        "local": recorder.local,
        "bytes": dict(strategy.ledger.bytes_by_tag),
        "inside": dict(strategy.group_ledger.bytes_by_tag),
        "momenta": [s["momentum"] for s in state],
    }


def many(rank: int, size: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_LEAST", 100)
        return {
            "majority": fit(rank, size, 2),
            "average": fit(rank, size, 2, vote="average"),
            "random": fit(rank, size, 2, ties="random", momentum_sync_every=STEPS),
            "one node": fit(rank, size, 4),
            "no nodes": fit(rank, size, 1),
            "thawed": thaw(rank, size, 2),
            "thawed without nodes": thaw(rank, size, 1),
        }


def play(node_size: int, vote: str) -> list[dict[str, Tensor]]:
    """Four ranks in this process: a worker's gradient is the mean of its ranks'."""
    module, size = Voter(), 4
    named = dict(module.named_parameters())
    group = {"params": list(named.values()), "betas": (0.9, 0.99), **SETTINGS}
    twin = SerialLion([group], size // node_size, vote)
    x, y = dataset(STEPS * BATCH * size).tensors
    seen = []
    for step in range(STEPS):
        gradients = []
        for rank in range(size):
            module.zero_grad()
            rows = slice(step * BATCH * size + rank, (step + 1) * BATCH * size, size)
            module.loss((x[rows], y[rows])).backward()
            gradients.append({p: p.grad.clone() for p in named.values()})
        nodes = [gradients[i : i + node_size] for i in range(0, size, node_size)]
        twin.step([{p: sum(g[p] for g in node) / node_size for p in node[0]} for node in nodes])
        seen.append({name: p.detach().clone() for name, p in named.items()})
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(many, 4, tmp_path_factory.mktemp("nodes"))


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_two_nodes_of_two_vote_as_two_workers(ranks: list[Any], vote: str) -> None:
    """A sum of two is exact in any order: bit for bit."""
    twin = play(2, vote)
    for outcomes in ranks:
        assert_same(outcomes[vote]["local"], twin)
    other = play(1, vote)[-1]["head.weight"]
    assert (twin[-1]["head.weight"] - other).abs().max() > SETTINGS["lr"], "nodes make a difference"


def test_one_node_is_lion_on_the_mean_gradient_and_sends_nothing_out(ranks: list[Any]) -> None:
    """DDP's sum of four rounds in another order: a sign may flip where a direction is nearly 0."""
    twin = play(4, "majority")
    for outcomes in ranks:
        outcome = outcomes["one node"]
        # the first message opens a channel over the world, for the start
        assert set(outcome["bytes"]) <= {"peers", "start", "handshake"}
        got = torch.cat([p.flatten() for p in outcome["local"][5].values()])
        expected = torch.cat([p.flatten() for p in twin[5].values()])
        assert (got - expected).abs().max() < SETTINGS["lr"] / 100
    apart = play(1, "majority")[5]["head.weight"] - twin[5]["head.weight"]
    assert apart.abs().max() >= SETTINGS["lr"], "votes of single ranks would be seen"


def test_ranks_agree_and_share_the_outgoing_votes(ranks: list[Any]) -> None:
    for outcomes in ranks:
        for case in ("majority", "average", "random"):
            assert_same(outcomes[case]["local"], ranks[0][case]["local"])
    first, second, third, _ = (outcomes["majority"]["momenta"] for outcomes in ranks)
    assert all(map(torch.equal, first, second)), "a node has one momentum"
    assert not any(map(torch.equal, first, third)), "nodes have their own"
    synced = [outcomes["random"]["momenta"] for outcomes in ranks]
    assert all(all(map(torch.equal, synced[0], other)) for other in synced)
    up = {size: ranks[0][size]["bytes"]["vote_up"] for size in ("majority", "no nodes")}
    assert up["majority"] < up["no nodes"], "each rank carries half of the ballot to one other node"
    assert ranks[0]["majority"]["inside"]["vote_node"] > 0


def test_thawing_within_a_node_is_refused(ranks: list[Any]) -> None:
    for outcomes in ranks:
        assert outcomes["thawed"].startswith("The parameters ['head.weight'] became trainable")
        assert "use `node_size=1`" in outcomes["thawed"]
        assert outcomes["thawed without nodes"] == ""
