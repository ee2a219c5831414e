"""One rank of `benchmarks.outage`: a fit that tells when it trains, and how it ended."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)

VOCABULARY, LENGTH, BATCH = 64, 16, 2
STEPS, TRAINS_AT = 40, 10
STEP_S = 0.05


class Trains(pl.Callback):
    """Makes each step as long as a larger model's; writes a file when the fit is under way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Look at the step."""
        time.sleep(STEP_S)
        if trainer.global_step == TRAINS_AT:
            (self._folder / f"trains_{trainer.global_rank}").write_text("")


def main(name: str, timeout_s: float, folder: Path) -> None:
    """Fit; leave `trains_RANK` and `ended_RANK.json` in the folder."""
    timeout = timedelta(seconds=timeout_s)
    strategy: Any = {
        "diloco": lambda: StreamingDiLoCoStrategy(sync_every=8, num_fragments=2, timeout=timeout),
        "lion": lambda: DistributedLionStrategy(timeout=timeout),
        "domino": lambda: DominoTPStrategy(tensor_parallel_size=2, timeout=timeout),
    }[name]()
    optimizer = DistributedLion if name == "lion" else torch.optim.AdamW
    module = Module(gpt2(VOCABULARY, LENGTH, layers=2, width=64), optimizer)
    trainer = quiet_trainer(strategy, 2, STEPS, [Trains(folder)])

    error = ""
    try:
        trainer.fit(module, loader(Tokens(VOCABULARY, LENGTH), BATCH))
    except RuntimeError as failure:
        error = str(failure)
    ended = {"step": trainer.global_step, "error": error, "at_s": time.monotonic()}
    (folder / f"ended_{trainer.global_rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
