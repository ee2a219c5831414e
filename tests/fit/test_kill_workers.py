"""A rank is killed whose data loader has a worker process that is busy and lives on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.fit import causal_lm
from tests.fit.any_strategy import KINDS, Voter, make_strategy
from tests.fit.models import Noisy, dataset, quiet_trainer
from tests.mortal import run_mortals

STEPS = 4


class Busy(Dataset[tuple[Tensor, ...]]):
    """Its worker takes half a minute for the batch after those that are trained on, on rank 1."""

    def __init__(self, rows: Dataset[tuple[Tensor, ...]], folder: Path, rank: int) -> None:
        self.rows, self.folder, self.rank = rows, folder, rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == STEPS and self.rank == 1:
            assert get_worker_info() is not None
            (self.folder / "worker").write_text(str(os.getpid()))
            time.sleep(30)
        return self.rows[index]


class DieWhileItIsBusy(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS - 1 and trainer.global_rank == 1:
            while not (self.folder / "worker").exists():
                time.sleep(0.05)
            (self.folder / "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def fit(rank: int, size: int, kind: str, folder: Path) -> None:
    trainer = quiet_trainer(
        strategy=make_strategy(kind, size),
        devices=size,
        max_steps=50,
        callbacks=[DieWhileItIsBusy(folder)],
        use_distributed_sampler=False,
    )
    torch.manual_seed(rank)
    module = {"diloco": Noisy, "lion": Voter, "domino": causal_lm.CausalLM}[kind]()
    rows = Busy(causal_lm.words(100) if kind == "domino" else dataset(100), folder, rank)
    trainer.fit(module, DataLoader(rows, num_workers=1, multiprocessing_context="fork"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_end_in_seconds_and_name_it(kind: str, tmp_path: Path) -> None:
    survivor, killed = run_mortals(fit, 2, tmp_path, kind, tmp_path)
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)  # fails if it was dead by now
    assert killed.exit_code == -signal.SIGKILL
    assert "rank 1 is gone" in survivor.error
    assert survivor.failed_s - float((tmp_path / "died").read_text()) < 15  # the timeout is 20
