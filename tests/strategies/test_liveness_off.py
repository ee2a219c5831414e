"""Each strategy with `liveness = False`: no port listens, and the fit is the same."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.strategies import any_strategy
from tests.world import run_ranks

SIZE = 2


class Ports(pl.Callback):
    """Counts the threads that answer while a fit runs."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        names = [thread.name for thread in threading.enumerate()]
        self.listening = names.count("peer-watch")


def play(rank: int, size: int) -> Any:
    found = {}
    for kind in any_strategy.KINDS:
        for liveness in (True, False):
            ports = Ports()
            pl.seed_everything(7)
            recorder = any_strategy.fit(kind, size, ports, liveness=liveness)
            found[kind, liveness] = ports.listening, recorder.local
    return found


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(play, SIZE, tmp_path_factory.mktemp("fits"))


@pytest.mark.parametrize("kind", any_strategy.KINDS)
def test_the_fit_is_the_same_without_a_port(fits: list[Any], kind: str) -> None:
    for found in fits:
        (on, watched), (off, unwatched) = found[kind, True], found[kind, False]
        assert on > 0
        assert off == 0
        assert len(watched) == len(unwatched) > 0
        for one, other in zip(watched, unwatched, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
