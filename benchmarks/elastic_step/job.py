"""Fit of one replica: `python -m benchmarks.elastic_step.job STEPS OUT`.

With COMMFREE_STORE, the replica is elastic and takes part in the job in that store. Otherwise it is
a rank of torchrun's job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy

REPLICAS = 2
SETTINGS: dict[str, Any] = {
    "sync_every": 12,
    "overlap_steps": 2,
}  # many exchanges: each costs something
WARM_UP = 24  # unmeasured steps: the replicas find each other, and each fragment lands once
VOCABULARY, LENGTH, LAYERS, WIDTH = 4096, 128, 6, 256
BATCH = 4


class Clock(pl.Callback):
    """Record the end time of every batch, by step."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends[trainer.global_step] = time.perf_counter()


def make_strategy() -> Strategy:
    """Return this replica's strategy."""
    if "COMMFREE_STORE" in os.environ:
        return ElasticDiLoCoStrategy(min_replicas=REPLICAS, max_replicas=REPLICAS, **SETTINGS)
    return StreamingDiLoCoStrategy(**SETTINGS)


def main(steps: int, out: Path) -> None:
    """Train, and write the mean time of a step in seconds, unless another replica's counts."""
    torch.set_num_threads(1)
    strategy, clock = make_strategy(), Clock()
    devices = 1 if isinstance(strategy, ElasticDiLoCoStrategy) else REPLICAS
    trainer = quiet_trainer(strategy, 1, WARM_UP + steps + 1, [clock], devices)
    model = gpt2(VOCABULARY, LENGTH, LAYERS, WIDTH)
    trainer.fit(Module(model), loader(Tokens(VOCABULARY, LENGTH), BATCH))
    assert len(clock.ends) == WARM_UP + steps + 1, "this replica has skipped steps"
    if trainer.is_global_zero:
        seconds = clock.ends[WARM_UP + steps] - clock.ends[WARM_UP]
        out.write_text(json.dumps(seconds / steps))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
