"""The real strategy, in a real Trainer on real gloo ranks, against the serial twin, after every
step and bit for bit: each rank a worker, or nodes of several ranks."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree import DistributedLion, DistributedLionStrategy
from lightning_commfree.lion import buckets
from tests.fit.models import (
    Recorder,
    Tiny,
    assert_same,
    dataset,
    quiet_trainer,
    rank_loader,
)
from tests.lion.serial import SerialLion
from tests.world import run_ranks

STEPS = 12
ACCUMULATE = 2
BATCH = 2
LR, DECAY = 0.02, 0.3
VOTES = ("majority", "average")


class Voter(Tiny):
    """Two groups: matrices decay, the others have another learning rate and other betas."""

    def configure_optimizers(self) -> Any:
        optimizer = DistributedLion(groups(self))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Thawing(Voter):
    """Unfreezes its head when DDP has been told which parameters to average."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.head.requires_grad_(True)


def groups(module: Tiny) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "lr": LR, "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "lr": LR / 4, "betas": (0.8, 0.95)},
    ]


def fit(rank: int, size: int, module: Tiny | None = None, **settings: Any) -> Any:
    recorder = Recorder()
    strategy = DistributedLionStrategy(**settings)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        callbacks=[recorder],
        accumulate_grad_batches=ACCUMULATE,
    )
    rows = STEPS * ACCUMULATE * BATCH * size
    try:
        trainer.fit(module or Voter(), rank_loader(rows, BATCH, rank, size))
    except RuntimeError as error:
        return str(error)
    return {
        "local": recorder.local[ACCUMULATE - 1 :: ACCUMULATE],
        "bytes": dict(strategy.ledger.bytes_by_tag),
        "within": dict(strategy.group_ledger.bytes_by_tag),
        "momenta": [state["momentum"] for state in trainer.optimizers[0].state.values()],
    }


def play(size: int, vote: str, node_size: int = 1) -> list[dict[str, Tensor]]:
    """The same training in this process; returns the parameters after every step.

    A worker's gradient is the mean of those of its node's ranks.
    """
    module = Voter()
    named = dict(module.named_parameters())
    twin_groups = [
        {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0, **group} for group in groups(module)
    ]
    twin = SerialLion(twin_groups, size // node_size, vote)
    x, y = dataset(STEPS * ACCUMULATE * BATCH * size).tensors
    seen = []
    for step in range(STEPS):
        if step in (4, 8):
            for group in twin_groups:
                group["lr"] *= 0.5
        gradients = []
        for rank in range(size):
            module.zero_grad()
            for micro in range(step * ACCUMULATE, (step + 1) * ACCUMULATE):
                rows = slice(micro * BATCH * size + rank, (micro + 1) * BATCH * size, size)
                (module.loss((x[rows], y[rows])) / ACCUMULATE).backward()
            gradients.append({p: p.grad.clone() for p in named.values()})
        nodes = [gradients[i : i + node_size] for i in range(0, size, node_size)]
        twin.step([{p: sum(g[p] for g in node) / node_size for p in node[0]} for node in nodes])
        seen.append(copy.deepcopy({name: p.detach() for name, p in named.items()}))
    return seen


def all_fits(rank: int, size: int) -> dict[Any, Any]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # several buckets for 200 parameters, so that some leave before others are ready
        patch.setattr(buckets, "_MIN_NUMEL", 40)
        for vote, overlap in product(VOTES, (True, False)):
            found[vote, overlap] = fit(rank, size, vote=vote, overlap=overlap)
        if size == 4:
            for vote in VOTES:
                found["nodes", vote] = fit(rank, size, vote=vote, node_size=2)
            found["nodes", "random"] = fit(rank, size, node_size=2, ties="random")
            found["one node"] = fit(rank, size, node_size=4)
            for node_size in (1, 2):
                found["thawed", node_size] = fit(rank, size, Thawing(), node_size=node_size)
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The results of 3 and of 4 ranks."""
    return {size: run_ranks(all_fits, size, tmp_path_factory.mktemp("fits")) for size in (3, 4)}


@pytest.mark.parametrize("size", [3, 4])
def test_every_step_equals_the_twin_bit_for_bit(played: Any, size: int) -> None:
    twins = {vote: play(size, vote) for vote in VOTES}
    for rank in played[size]:
        for vote, overlap in product(VOTES, (True, False)):
            assert_same(rank[vote, overlap]["local"], twins[vote])
    apart = twins["majority"][-1]["head.weight"] - twins["average"][-1]["head.weight"]
    assert apart.abs().max() > LR, "the two votes must differ, or the comparison is weak"


@pytest.mark.parametrize("vote", VOTES)
def test_two_nodes_of_two_vote_as_two_workers(played: Any, vote: str) -> None:
    """A sum of two is exact in any order: bit for bit."""
    twin = play(4, vote, node_size=2)
    for rank in played[4]:
        assert_same(rank["nodes", vote]["local"], twin)
    other = play(4, vote)[-1]["head.weight"]
    assert (twin[-1]["head.weight"] - other).abs().max() > LR, "nodes make a difference"


def test_one_node_is_lion_on_the_mean_gradient_and_sends_nothing_out(played: Any) -> None:
    """DDP's sum of four rounds in another order: a sign may flip where a direction is nearly 0."""
    twin, single = play(4, "majority", node_size=4)[2], play(4, "majority")[2]
    for rank in played[4]:
        # the first message opens a channel over the world, for the start; the last compares weights
        assert set(rank["one node"]["bytes"]) <= {"peers", "start", "handshake", "drift"}
        torch.testing.assert_close(rank["one node"]["local"][2], twin, rtol=0, atol=LR / 100)
    apart = (single["head.weight"] - twin["head.weight"]).abs().max()
    assert apart >= LR, "votes of single ranks would be seen"


def test_ranks_agree_and_share_the_outgoing_votes(played: Any) -> None:
    ranks = played[4]
    for rank in ranks:
        assert_same(rank["nodes", "random"]["local"], ranks[0]["nodes", "random"]["local"])
    first, second, third, _ = (rank["nodes", "majority"]["momenta"] for rank in ranks)
    assert_same(second, first)  # a node has one momentum
    assert not any(map(torch.equal, first, third)), "nodes have their own"
    nodes, single = (ranks[0][key]["bytes"] for key in (("nodes", "majority"), ("majority", True)))
    assert nodes["vote_up"] < single["vote_up"], "each rank carries half of the ballot"
    assert ranks[0]["nodes", "majority"]["within"]["vote_node"] > 0


def test_thawing_within_a_node_is_refused(played: Any) -> None:
    for rank in played[4]:
        assert rank["thawed", 2].startswith("The parameters ['head.weight'] became trainable")
        assert "use `node_size=1`" in rank["thawed", 2]
        assert len(rank["thawed", 1]["local"]) == STEPS
