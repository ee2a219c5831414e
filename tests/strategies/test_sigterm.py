"""SIGTERM on one rank ends all ranks after the same step, and saves what Lightning would save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_commfree import StreamingDiLoCoStrategy
from tests.strategies.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks


class TermAt(pl.Callback):
    """Sends SIGTERM to this process during batch `step`, on one rank only."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(rank: int, size: int, folder: Path) -> list[Any]:
    # a fragment leaves at 8 (p=0), 12 (p=1), 16 ...; SIGTERM in step 10 travels at 12, lands at 15
    return [
        end_early(size, folder / "mid", step=10, max_steps=100),
        end_early(size, folder / "last", step=20, max_steps=20),
        end_early(size, folder / "first", step=2, max_steps=100),  # nothing leaves before step 8
    ]


def end_early(size: int, folder: Path, step: int, max_steps: int) -> Any:
    strategy = StreamingDiLoCoStrategy(
        sync_every=8, num_fragments=2, overlap_steps=3, wire_dtype="fp32"
    )
    saving = OnExceptionCheckpoint(folder)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=max_steps,
        enable_checkpointing=True,
        callbacks=[TermAt(step, rank=1), saving],
    )
    module = Tiny()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(module, loader(100 * 2 * size))
        ended_by = None
    except SIGTERMException as exception:
        ended_by = type(exception).__name__
    restored = signal.getsignal(signal.SIGTERM) == handler
    lightnings_own = "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    return (
        ended_by,
        trainer.global_step,
        restored and lightnings_own,
        sorted(os.listdir(folder)) if folder.exists() else [],
    )


def test_all_ranks_stop_after_the_same_step_and_save(tmp_path: Path) -> None:
    ranks = run_ranks(fit, 3, tmp_path, tmp_path / "checkpoints")
    for mid_outcome, last_outcome, first_outcome in ranks:
        mid, mid_step, mid_clean, mid_files = mid_outcome
        last, last_step, last_clean, _ = last_outcome
        assert first_outcome[:2] == ("SIGTERMException", 8 + 3)
        assert (mid, mid_step) == ("SIGTERMException", 15)
        assert mid_files == ["on_exception.ckpt", "replicas"]
        assert mid_clean
        # in the very last step the fit is complete; Lightning raises behind it, here as under DDP
        assert (last, last_step) == ("SIGTERMException", 20)
        assert last_clean
    saved = torch.load(tmp_path / "checkpoints/mid/on_exception.ckpt", weights_only=True)
    module = Tiny()
    module.load_state_dict(saved["state_dict"])
    assert saved["global_step"] == 15
