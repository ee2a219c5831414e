"""Between syncs a run sends nothing at all: every call on every process group of 50 steps,
counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_commfree import (
    DistributedLionStrategy,
    StreamingDiLoCoStrategy,
)
from tests.fit.collectives import counted
from tests.fit.models import Tiny, Voter, loader, quiet_trainer
from tests.world import run_ranks

STEPS = 50


class Clock(pl.Callback):
    """Knows between which steps a call falls; None before the first batch and after the last."""

    def __init__(self) -> None:
        self.step: int | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step + 1

    def on_train_end(self, *_: Any) -> None:
        self.step = None


def fit(rank: int, size: int) -> dict[str, Any]:
    diloco = StreamingDiLoCoStrategy(
        sync_every=10, num_fragments=2, overlap_steps=3, wire_dtype="bf16"
    )
    return {
        "diloco": count(diloco, size),
        "ddp": count(DDPStrategy(), size),
        "lion": count(DistributedLionStrategy(), size, VotingLogs()),
    }


class Logs(Tiny):
    """Logs in every batch."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        self.log("every", loss, on_step=True, sync_dist=True)
        return loss


class VotingLogs(Logs, Voter):
    pass


def count(strategy: Any, size: int, module: Tiny | None = None) -> list[tuple[int, str]]:
    clock = Clock()
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_epochs=2, callbacks=[clock], log_every_n_steps=1
    )
    with counted(lambda: clock.step) as calls:
        trainer.fit(module or Logs(), loader(STEPS * 2 * size // 2))
    assert trainer.global_step == STEPS
    return [(step, name) for step, name in calls if step is not None]


def test_a_run_sends_only_at_its_syncs(tmp_path: Path) -> None:
    """Two epochs, a metric logged with `sync_dist=True` at every step, and no other call in a step.

    Fragment 0 leaves after steps 10, 20, ... 50, fragment 1 after 15, 25, ... 45; the fit ends
    after step 50, lands what is in flight and exchanges both fragments once more.
    """
    for calls in run_ranks(fit, 2, tmp_path):
        launches = [10, 15, 20, 25, 30, 35, 40, 45, 50]
        # the channel gathers by an all-to-all of copies, which survives the death of a peer, and
        # there is one for each direction
        expected = [(step, "all_to_all_single") for step in [*launches, 50, 50] for _ in range(2)]
        # at the end of each epoch, Lightning's reduce: who wants to stop?
        agreed = [(step, name) for step in (25, 50) for name in ("barrier", "allreduce")]
        assert sorted(calls["diloco"]) == sorted([*expected, *agreed])
        # the counter sees what Lightning's own strategy sends: at least a broadcast at every batch
        assert {step for step, _ in calls["ddp"]} >= set(range(2, STEPS + 1))
        assert sum(name == "broadcast" for _, name in calls["ddp"]) >= STEPS - 1
        # one bucket, gathered by two workers whose votes are all there: one exchange a step
        steps = [step for step in range(1, STEPS + 1) for _ in range(2)]
        votes = [(step, "all_to_all_single") for step in steps]
        assert sorted(calls["lion"]) == sorted([*votes, *agreed])
