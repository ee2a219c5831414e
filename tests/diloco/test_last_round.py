"""Replicas whose trainings end after different steps end together, with the mean of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import DATA, REPLICA, replica_mesh
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.exchange import GatheredFragmentExchange, ShardedFragmentExchange
from tests.diloco.training import DEFAULTS, assert_equal_states, state_of
from tests.world import run_ranks


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))


class Remembering:
    """Keeps the local weights with which the last round began."""

    before: dict[str, Tensor] | None = None

    def settle_arrived(self, p: int) -> bool:
        if self.before is None:
            self.before = state_of(self._module)  # type: ignore[attr-defined]
        return super().settle_arrived(p)  # type: ignore[misc]


class Streaming(Remembering, StreamingDiLoCo):
    pass


def train(rank: int, size: int, ends: list[int], changes: dict[str, Any], width: int = 5) -> Any:
    """Train until `ends[rank]`, or until others have ended; return how it ended."""
    settings = DiLoCoSettings(**{**DEFAULTS, **changes})
    mesh = replica_mesh(size, settings.replica_size)
    ledger = Ledger()
    channel = Channel.open(mesh.groups(REPLICA), rank, ledger)
    inside = Channel.open(mesh.groups(DATA), rank, Ledger())
    module = Layers(width)
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    diloco = Streaming(module, fragments, settings, channel, inside)
    replica = rank // settings.replica_size
    steps = 0
    while steps < ends[replica] and not diloco.parted:
        steps += 1
        generator = torch.Generator().manual_seed(1000 * replica + steps)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        diloco.after_step()
    sent = ledger.bytes_by_tag["outer_gradient"]
    diloco.finish()
    assert diloco.in_flight == []
    assert diloco.weight_swap.is_local()
    last = ledger.bytes_by_tag["outer_gradient"] - sent
    way = type(diloco._transfers.exchanges[0])
    diloco.close()
    inside.close()
    channel.close()
    return {
        "steps": steps,
        "step": diloco.step,
        "parted": diloco.parted,
        "before": diloco.before,
        "after": state_of(module),
        "last": last,
        "round": sum(mean.exchange.num_bytes for mean in diloco.means),
        "way": way,
    }


def check(ranks: list[Any]) -> None:
    replicas = len(ranks)
    for rank in ranks:
        assert_equal_states(rank["after"], ranks[0]["after"])
        assert rank["step"] == ranks[0]["step"]
        for name, tensor in rank["after"].items():
            mean = sum(one["before"][name] for one in ranks) / replicas
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)
    apart = ranks[0]["before"]["layers.0.weight"] - ranks[-1]["before"]["layers.0.weight"]
    assert apart.abs().max() > 1e-2, "there was something to average"


# settings; steps of the replicas; the step after which those end that would go on
CASES: list[tuple[dict[str, Any], list[int], int]] = [
    ({"num_fragments": 2}, [6, 20], 9),  # launched after step 8, landed after 9
    ({"num_fragments": 2}, [20, 5], 7),
    ({"num_fragments": 2}, [1, 20], 5),  # in the first cycle
    ({"num_fragments": 2}, [0, 20], 5),
    ({"num_fragments": 2, "overlap_steps": 0}, [6, 20], 8),
    ({"num_fragments": 2, "overlap_steps": 3}, [8, 20, 9], 13),  # two of three in flight
    ({"sync_every": 6, "num_fragments": 3, "overlap_steps": 5}, [7, 20, 20], 13),
    ({"sync_every": 6, "num_fragments": 3, "overlap_steps": 5}, [7, 11, 20], 13),
    ({"sync_every": 2, "num_fragments": 6}, [4, 20], 6),  # several leave after one step
    ({"sync_every": 2, "num_fragments": 6, "overlap_steps": 0}, [4, 20], 5),
]


def play(rank: int, size: int) -> dict[int, Any]:
    return {
        i: train(rank, size, ends, changes)
        for i, (changes, ends, _) in enumerate(CASES)
        if len(ends) == size
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    outcomes: dict[int, list[Any]] = {}
    for size in (2, 3):
        ranks = run_ranks(play, size, tmp_path_factory.mktemp("ending"))
        outcomes |= {i: [rank[i] for rank in ranks] for i in ranks[0]}
    return outcomes


@pytest.mark.parametrize("case", range(len(CASES)))
def test_those_that_go_on_end_where_they_learn_of_it(
    played: dict[int, list[Any]], case: int
) -> None:
    _, ends, common = CASES[case]
    ranks = played[case]
    assert [rank["steps"] for rank in ranks] == [min(end, common) for end in ends]
    assert all(rank["parted"] and rank["step"] == common for rank in ranks)
    check(ranks)


@pytest.mark.parametrize(
    ("size", "width", "way"), [(2, 5, GatheredFragmentExchange), (3, 64, ShardedFragmentExchange)]
)
def test_both_ways_of_an_exchange(size: int, width: int, way: type, tmp_path: Path) -> None:
    ends = [5, *[20] * (size - 1)]
    ranks = run_ranks(train, size, tmp_path, ends, {"num_fragments": 2}, width)
    assert {rank["way"] for rank in ranks} == {way}
    assert [rank["steps"] for rank in ranks] == [5, *[7] * (size - 1)]
    check(ranks)


def test_a_replica_of_two_ranks_ends_as_one(tmp_path: Path) -> None:
    changes = {"num_fragments": 2, "replica_size": 2}
    ranks = run_ranks(train, 4, tmp_path, [6, 20], changes)
    assert [rank["steps"] for rank in ranks] == [6, 6, 9, 9]
    check([ranks[0], ranks[2]])
    for rank in ranks:
        assert_equal_states(rank["after"], ranks[0]["after"])


def test_all_end_between_two_launches(tmp_path: Path) -> None:
    """After different steps, so that nobody goes on; they are told all the same."""
    changes = {"num_fragments": 1}
    ranks = run_ranks(train, 2, tmp_path, [5, 7], changes)
    assert [rank["steps"] for rank in ranks] == [5, 7]
    assert all(rank["parted"] and rank["step"] == 7 for rank in ranks)
    check(ranks)


@pytest.mark.parametrize(("steps", "overlap_steps"), [(6, 1), (6, 3), (1, 1), (8, 0)])
def test_who_ends_together_sends_nothing_for_it(
    steps: int, overlap_steps: int, tmp_path: Path
) -> None:
    changes = {"num_fragments": 2, "overlap_steps": overlap_steps}
    ranks = run_ranks(train, 2, tmp_path, [steps, steps], changes)
    assert not any(rank["parted"] for rank in ranks)
    assert all(rank["step"] == steps for rank in ranks)
    assert all(rank["last"] == rank["round"] for rank in ranks), "every fragment once"
    check(ranks)
