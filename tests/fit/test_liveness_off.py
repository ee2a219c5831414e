"""Failure detection opens no port, and with `liveness = False` each strategy trains the same."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from tests.comm.watches import listening
from tests.fit import any_strategy
from tests.fit.models import Noisy, assert_same, loader, quiet_trainer
from tests.world import run_ranks

SIZE = 2


class Look(pl.Callback):
    """Counts threads of ours, listening sockets and process groups while a fit runs."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.watching = watching()
        self.listening = listening()
        self.groups = len(dist.distributed_c10d._world.pg_map)


def watching() -> int:
    return [thread.name for thread in threading.enumerate()].count("peer-watch")


def play(rank: int, size: int) -> Any:
    found = {}
    for kind in any_strategy.KINDS:
        for liveness in (True, False):
            look = Look()
            pl.seed_everything(7)
            recorder = any_strategy.fit(kind, size, look, liveness=liveness)
            found[kind, liveness] = look, recorder.local, watching()
    look = Look()
    quiet_trainer(strategy="ddp", devices=size, max_steps=2, callbacks=[look]).fit(
        Noisy(), loader(8, 2)
    )
    found["ddp"] = look
    return found


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(play, SIZE, tmp_path_factory.mktemp("fits"))


@pytest.mark.parametrize("kind", any_strategy.KINDS)
def test_the_fit_is_the_same_without_it(fits: list[Any], kind: str) -> None:
    for found in fits:
        (on, watched, _), (off, unwatched, _) = found[kind, True], found[kind, False]
        assert on.watching == 1
        assert off.watching == 0
        assert watched
        assert_same(unwatched, watched)


@pytest.mark.parametrize("kind", any_strategy.KINDS)
def test_its_thread_ends_with_the_fit(fits: list[Any], kind: str) -> None:
    assert [found[kind, True][2] for found in fits] == [0] * SIZE


@pytest.mark.parametrize("kind", any_strategy.KINDS)
def test_no_socket_listens_but_the_stores_and_one_of_gloos_for_each_group(
    fits: list[Any], kind: str
) -> None:
    for rank, found in enumerate(fits):
        ours, ddp = found[kind, True][0], found["ddp"]
        assert ddp.listening == ddp.groups + (rank == 0), "gloo's and the store's under DDP"
        assert ours.listening == ours.groups + (rank == 0)
