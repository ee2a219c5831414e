"""Disk and memory that a DiLoCo checkpoint takes: the shared state and rank 0's optimizer are on
disk once, and in memory a save takes one copy of the weights, which are put aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import dataset, quiet_trainer
from tests.fit.saved import file_of
from tests.world import run_ranks

WIDTH, LAYERS, SIZE = 1024, 8, 2
NUMEL = WIDTH**2 * LAYERS
SLACK = 0.1  # bytes a parameter


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = batch[0].repeat(1, WIDTH)[:, :WIDTH].to(self.blocks[0].weight.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Measured(pl.Callback):
    """Saves once; keeps how much more memory this rank had at the most then, in bytes."""

    more: float = -1.0

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.after:
            return
        before = memory("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the highest mark
        except OSError:
            before = float("nan")
        trainer.save_checkpoint(self.path)
        self.more = memory("VmHWM") - before


def memory(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def save(rank: int, size: int, folder: Path) -> tuple[float, int, int]:
    measured = Measured(folder / "a.ckpt", after=5)
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(
            sync_every=2,
            num_fragments=2,
            fragment_pattern="balanced",
            wire_dtype="int8",
            evaluate="outer",
        ),
        devices=size,
        max_steps=6,
        precision="bf16-true",
        callbacks=[measured],
    )
    trainer.fit(Wide(), DataLoader(dataset(40), batch_size=2))
    trainer.strategy.barrier()
    own = file_of(measured.path, rank) if rank else measured.path
    return measured.more / NUMEL, own.stat().st_size, rank


def test_a_save_holds_nothing_twice(tmp_path: Path) -> None:
    (more_0, whole, _), (more_1, own, _) = run_ranks(save, SIZE, tmp_path, tmp_path)
    weight = 2
    adam, momentum, global_copy = 2 * weight, 4, 4
    in_flight = 0.55  # the bytes of one of two fragments, in int8, from each rank
    expected = weight + adam + weight + momentum + global_copy
    assert expected - SLACK < whole / NUMEL < expected + 2 * in_flight + SLACK
    assert weight + adam - SLACK < own / NUMEL < weight + adam + 2 * in_flight + SLACK
    if more_0 != more_0:
        pytest.skip("/proc/self/clear_refs cannot be written here, so only the disk was measured")
    for more in (more_0, more_1):  # one copy, and while it is made a fragment's; there were 29
        assert more < weight + 4.5
