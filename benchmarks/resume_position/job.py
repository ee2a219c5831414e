"""Job of one rank of `benchmarks.resume_position`: a fit that saves, and fits that resume."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.common.fits import quiet_trainer
from lightning_commfree import StreamingDiLoCoStrategy

SYNC_EVERY = 50


class SlowRows(Dataset[Tensor]):
    """Rows that take some time to read, fp32 of shape (8,); the first value is the index."""

    def __init__(self, rows: int, delay_s: float) -> None:
        self._rows, self._delay_s = rows, delay_s

    def __len__(self) -> int:
        return self._rows

    @override
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._delay_s)
        return torch.tensor([index, *range(7)], dtype=torch.float32)


class Regression(pl.LightningModule):
    """A linear layer that records, by step, which row it is trained on, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 1)
        self.seen: dict[int, tuple[float, float]] = {}  # row, seconds

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch[:, 1:]).square().mean()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.seen[self.global_step] = batch[0, 0].item(), time.perf_counter()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saves(pl.Callback):
    """Save after some batches."""

    def __init__(self, folder: Path, batches: Sequence[int]) -> None:
        self._folder, self._batches = folder, batches

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self._batches:
            trainer.save_checkpoint(self._folder / f"{trainer.global_step}.ckpt")


def fit(
    ranks: int, rows: int, steps: int, saves: Saves | None, delay_s: float, path: Path | None
) -> tuple[dict[int, tuple[float, float]], float]:
    """Train; return which row was trained on in each step, and when, and when the fit began."""
    torch.manual_seed(1 if path is None else 2)
    module, loader = Regression(), DataLoader(SlowRows(rows, delay_s), shuffle=True)
    strategy = StreamingDiLoCoStrategy(sync_every=SYNC_EVERY, num_fragments=1)
    callbacks = [] if saves is None else [saves]
    trainer = quiet_trainer(strategy, nodes=1, max_steps=steps, callbacks=callbacks, devices=ranks)
    begin = time.perf_counter()
    trainer.fit(module, loader, ckpt_path=path)
    return module.seen, begin


def measure(
    ranks: int, batches: Sequence[int], rounds: int, delay_s: float, folder: Path
) -> dict[int, list[float]]:
    """Return the seconds from the start of a resumed fit to the end of its first batch.

    Args:
        ranks: number of replicas.
        batches: numbers of batches of the epoch after which a fit resumes.
        rounds: number of resumes from each.
        delay_s: seconds that it takes to read a row, which is a batch.
        folder: for the checkpoints; the same on all ranks.

    Raises:
        RuntimeError: a resumed fit was trained on another row than the fit that saved.
    """
    last = max(batches)
    rows = ranks * (last + 100)
    straight, _ = fit(ranks, rows, last + 1, Saves(folder, batches), 0, None)
    found: dict[int, list[float]] = {count: [] for count in batches}
    for _ in range(rounds):
        for count in batches:
            seen, begin = fit(ranks, rows, count + 1, None, delay_s, folder / f"{count}.ckpt")
            row, end = seen[count + 1]
            if row != straight[count + 1][0]:
                raise RuntimeError(
                    f"After batch {count} the resumed fit was trained on row {row:.0f}, and the fit"
                    f" that saved on row {straight[count + 1][0]:.0f}."
                )
            found[count].append(end - begin)
    return found


def main() -> None:
    """Measure the plan in the first argument; write this rank's seconds into the second one."""
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    found = measure(**plan, folder=folder)
    rank = torch.distributed.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps([*found.items()]))


if __name__ == "__main__":
    main()
