"""FSDP's bytes within a replica: the group's ledger equals the collectives that torch ran."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.comm.ledger import STEPS
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.layouts.fully_shard import GATHER_TAG, SCATTER_TAG
from tests.fit.models import quiet_trainer, rank_loader
from tests.fit.test_fsdp import Uneven
from tests.world import run_ranks

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

BATCHES, BATCH = 6, 2


class Sent(pl.Callback):
    """Adds up what FSDP's collectives send from the first batch to the last."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    def on_train_start(self, *_: Any) -> None:
        # the latter in older torch
        self._watch(("all_gather_single", "all_gather_into_tensor"), GATHER_TAG, own_part=1)
        self._watch(("reduce_scatter_single", "reduce_scatter_tensor"), SCATTER_TAG, own_part=0)

    def on_train_end(self, *_: Any) -> None:
        self._patch.undo()

    def _watch(self, names: Sequence[str], tag: str, own_part: int) -> None:
        name = next(name for name in names if hasattr(dist, name))
        call = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(call).bind(*args, **kwargs).arguments
            mine = list(given.values())[own_part]  # they are called with output, input
            self.bytes[tag] += mine.nbytes * (dist.get_world_size(given["group"]) - 1)
            return call(*args, **kwargs)

        self._patch.setattr(dist, name, counted)


def fit(rank: int, size: int, replica_size: int, accumulated: int, sharded: bool) -> Any:
    inside = "fsdp" if sharded else "ddp"
    strategy = StreamingDiLoCoStrategy(
        sync_every=3, overlap_steps=1, replica_size=replica_size, inside=inside
    )
    sent = Sent()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[sent],
    )
    trainer.fit(Uneven(), rank_loader(BATCHES * BATCH * size, BATCH, rank, size))
    counted = strategy.group_ledger.bytes_by_phase[STEPS]
    return {tag: counted[tag] for tag in (GATHER_TAG, SCATTER_TAG)}, dict(sent.bytes)


def fits(rank: int, size: int) -> Any:
    return {
        "two": fit(rank, size, 2, 1, True),
        "four": fit(rank, size, 4, 1, True),
        "accumulated": fit(rank, size, 2, 3, True),
        "ddp": fit(rank, size, 2, 1, False),
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fits, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["two", "four", "accumulated"])
def test_the_ledger_holds_what_the_collectives_of_fsdp_send(
    played: list[dict[str, Any]], name: str
) -> None:
    for rank in played:
        counted, sent = rank[name]
        assert counted == sent
        assert min(counted.values()) > 0


def test_gradients_that_are_accumulated_are_scattered_once(played: list[dict[str, Any]]) -> None:
    alone, accumulated = played[0]["two"][0], played[0]["accumulated"][0]
    assert accumulated[GATHER_TAG] == alone[GATHER_TAG]
    assert 3 * accumulated[SCATTER_TAG] == alone[SCATTER_TAG]


def test_ddp_is_not_counted(played: list[dict[str, Any]]) -> None:
    assert set(played[0]["ddp"][0].values()) == {0}
