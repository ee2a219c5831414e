"""One node's fit with `sync_every="auto"`: `python -m benchmarks.auto.job CELL STEPS FILE HALF`.

Writes what it has measured to FILE, and creates HALF after half of the steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.auto.cells import Cell, Measured
from benchmarks.bandwidth.job import WORKLOADS
from benchmarks.common.fits import Module, Tokens, loader, quiet_trainer
from lightning_commfree import StreamingDiLoCoStrategy


class Stopwatch(pl.Callback):
    """Measure every step, and how long of it Streaming DiLoCo blocked training."""

    def __init__(self, half: int, reached: Path) -> None:
        self._half, self._reached = half, reached
        self._ended_s = 0.0
        self.measured = Measured([], [], [])

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy._diloco.after_step = self._timed(strategy._diloco.after_step)
        self._ended_s = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now_s = time.perf_counter()
        self.measured.step_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        if trainer.global_step == self._half:
            self._reached.touch()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.measured.paces.extend(tuple(one) for one in strategy._diloco.schedule.paces)

    def _timed(self, work: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            begun_s = time.perf_counter()
            work()
            self.measured.blocked_s.append(time.perf_counter() - begun_s)

        return timed


def main() -> None:
    """Run the fit."""
    cell, steps = Cell(*json.loads(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = WORKLOADS[cell.size]
    stopwatch = Stopwatch(steps // 2, Path(sys.argv[4]))
    strategy = StreamingDiLoCoStrategy(sync_every="auto")
    trainer = quiet_trainer(strategy, dist.get_world_size(), steps, [stopwatch])
    tokens = Tokens(workload.vocabulary, workload.tokens)
    trainer.fit(Module(workload.model()), loader(tokens, workload.batch))
    Path(sys.argv[3]).write_text(json.dumps(stopwatch.measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
