"""One rank leaves out a step, and saves or validates where the others exchange: an error on all
ranks names both in seconds, and no process is aborted by messages of different sizes."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.host import pl
from tests.fit.models import Noisy, SavesAfterBatches, Voter, loader, quiet_trainer
from tests.mortal import run_mortals

TIMEOUT = timedelta(seconds=60)
LEFT_OUT = 3  # the batch, counted from 1


class Unsaved(pl.Callback):
    """One rank saves on its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == LEFT_OUT:
            trainer.save_checkpoint(self.path)


def fit(rank: int, size: int, folder: Path, kind: str, what: str) -> float:
    class Skips(Voter if kind == "lion" else Noisy):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            # with automatic optimization, replicas of Streaming DiLoCo may leave out steps
            self.automatic_optimization = kind == "lion"

        def steps(self, batch: int) -> bool:
            return what == "saves alone" or self.global_rank != 1 or batch + 1 != LEFT_OUT

        def training_step(self, batch: Any, i: int) -> Any:
            if self.automatic_optimization:
                return super().training_step(batch, i)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if self.steps(i):
                optimizer.step()
            return None

        def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any) -> None:
            if self.steps(batch):
                super().optimizer_step(epoch, batch, optimizer, closure)
            else:
                closure()

    strategy: Any
    if kind == "lion":
        strategy = DistributedLionStrategy(timeout=TIMEOUT)
    else:  # with `overlap_steps=0`, rank 0 waits in its third step
        overlap = {"exchange": 0, "apart": 1}[kind]
        every = 3 if kind == "exchange" else 6
        strategy = StreamingDiLoCoStrategy(
            sync_every=every, num_fragments=1, overlap_steps=overlap, timeout=TIMEOUT
        )
    saves = {"saves": SavesAfterBatches(folder, LEFT_OUT), "saves alone": Unsaved(folder / "a")}
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=12,
        num_sanity_val_steps=0,
        val_check_interval=LEFT_OUT if what == "validates" else 1.0,
        callbacks=[saves[what]] if what in saves else [],
    )
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match="after step|different steps|took no optimizer step"
    ) as raised:
        trainer.fit(Skips(), loader(80, 2), loader(4, 2))
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 3
    return str(raised.value)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["lion", "exchange", "apart"])
@pytest.mark.parametrize("what", ["saves", "validates", "saves alone"])
def test_both_ranks_are_named(tmp_path: Path, kind: str, what: str) -> None:
    ends = run_mortals(fit, 2, tmp_path, tmp_path / "saved", kind, what, timeout=TIMEOUT)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert not any(end.error for end in ends), ends
    first, second = (end.result for end in ends)
    assert first == second
    assert "ank 0 " in first
    assert "ank 1 " in first
