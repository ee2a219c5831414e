"""A rank raises an error while its process lives on, as in a sweep or a notebook: the other ranks
of its replica end in seconds, and the next fit in the same processes works."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_commfree import (
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.comm.liveness import PeerLostError
from lightning_commfree.host import pl
from tests.fit import causal_lm
from tests.fit.models import Tiny, Voter, dataset, quiet_trainer
from tests.world import free_port, run_ranks

TIMEOUT = timedelta(seconds=60)
KINDS = ("fsdp", "ddp", "domino", "lion fsdp", "domino_tp")


class UserError(Exception):
    """A mistake in the user's code."""


class Raises(pl.Callback):
    def __init__(self, place: str, rank: int) -> None:
        self.place, self.rank = place, rank

    def at(self, place: str, trainer: pl.Trainer) -> None:
        if (place, trainer.global_rank) == (self.place, self.rank) and trainer.global_step == 3:
            raise UserError

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("batch", trainer)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("backward", trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("validation", trainer)


def fit(kind: str, liveness: bool = True, *callbacks: pl.Callback, **kwargs: Any) -> None:
    strategy: Any
    if kind == "domino_tp":
        strategy = DominoTPStrategy(2, "batch", timeout=TIMEOUT)
    elif kind == "lion fsdp":
        strategy = DistributedLionStrategy(node_size=2, inside="fsdp", timeout=TIMEOUT)
    else:
        strategy = StreamingDiLoCoStrategy(
            sync_every=10, replica_size=2, inside=kind, timeout=TIMEOUT
        )
    strategy.liveness = liveness
    words = "domino" in kind
    data = DataLoader(causal_lm.words(20) if words else dataset(40), batch_size=2)
    module = causal_lm.CausalLM() if words else Voter() if "lion" in kind else Tiny()
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_steps=4, callbacks=[*callbacks], **kwargs
    )
    trainer.fit(module, data, data)


def two_fits(
    rank: int, size: int, folder: Path, port: int, kind: str, place: str, culprit: int, alive: bool
) -> Any:
    """Return the error of the first fit and its seconds; the ranks stay until both have ended."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)  # so that Lightning creates its own group
    start = time.monotonic()
    error: Any = None
    every = {"val_check_interval": 3} if place == "validation" else {}
    try:
        fit(kind, alive, Raises(place, culprit), **every)
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        error = raised
    took_s = time.monotonic() - start
    (folder / f"ended_{rank}").touch()
    while not all((folder / f"ended_{other}").exists() for other in range(size)):
        time.sleep(0.05)
    if (kind, place) != ("ddp", "validation"):  # there, it is Lightning's own group that broke
        fit(kind)
    return type(error).__name__, str(error), took_s


@pytest.mark.parametrize(
    ("kind", "place", "culprit"),
    # every place where torch's own collectives are waited for, and every kind once
    [("fsdp", "backward", 0), ("fsdp", "validation", 1), *((kind, "batch", 1) for kind in KINDS)],
)
def test_the_others_end_in_seconds(tmp_path: Path, kind: str, place: str, culprit: int) -> None:
    outcomes = run_ranks(two_fits, 2, tmp_path, tmp_path, free_port(), kind, place, culprit, True)
    (name, text, took_s), (own, _, _) = outcomes[1 - culprit], outcomes[culprit]
    assert own == UserError.__name__
    assert name == PeerLostError.__name__, text
    assert f"rank {culprit} is gone" in text
    assert took_s < TIMEOUT.total_seconds() / 3


def test_they_end_without_heartbeats_too(tmp_path: Path) -> None:
    outcomes = run_ranks(two_fits, 2, tmp_path, tmp_path, free_port(), "fsdp", "batch", 1, False)
    name, text, took_s = outcomes[0]
    assert name == "RuntimeError", text
    assert took_s < TIMEOUT.total_seconds() / 3
