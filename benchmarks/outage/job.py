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
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)

WORDS, LENGTH, BATCH = 64, 16, 2
STEPS, TRAINS_AT = 40, 10
STEP_S = 0.05


class Model(pl.LightningModule):
    """A small GPT-2."""

    def __init__(self, lion: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS,
                n_positions=LENGTH,
                n_embd=64,
                n_layer=2,
                n_head=4,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self.lion = lion

    def training_step(self, batch: Any, _: int) -> Tensor:
        """Compute the loss."""
        time.sleep(STEP_S)  # a step of a larger model
        loss: Tensor = self.lm(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what the strategy asks for."""
        if self.lion:
            return DistributedLion(self.parameters(), lr=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Trains(pl.Callback):
    """Writes a file when the fit is under way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Look at the step."""
        if trainer.global_step == TRAINS_AT:
            self.path.write_text("")


def main(name: str, timeout_s: float, folder: Path) -> None:
    """Fit; leave `trains_RANK` and `ended_RANK.json` in the folder."""
    timeout = timedelta(seconds=timeout_s)
    strategy: Any = {
        "diloco": lambda: StreamingDiLoCoStrategy(sync_every=8, num_fragments=2, timeout=timeout),
        "lion": lambda: DistributedLionStrategy(timeout=timeout),
        "domino": lambda: DominoTPStrategy(tensor_parallel_size=2, timeout=timeout),
    }[name]()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1,
        num_nodes=2,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank = trainer.global_rank
    trainer.callbacks.append(Trains(folder / f"trains_{rank}"))  # type: ignore[attr-defined]
    same = torch.Generator().manual_seed(0)  # on all ranks
    rows = torch.randint(0, WORDS, (STEPS * BATCH * 2, LENGTH), generator=same)
    error = ""
    try:
        trainer.fit(Model(name == "lion"), DataLoader(TensorDataset(rows), batch_size=BATCH))
    except RuntimeError as failure:
        error = str(failure)
    ended = {"step": trainer.global_step, "error": error, "at_s": time.monotonic()}
    (folder / f"ended_{rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
