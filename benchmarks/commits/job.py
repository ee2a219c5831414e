"""Fit of one node with the checkout on PYTHONPATH. Uses public names only, to run with both.

``python job.py ROW STEPS OUT``: rank 0 writes the seconds of every step to OUT as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy

WARM_UP = 8  # unmeasured steps: allocations, and the first exchange
SYNC_EVERY = 6
BATCH, TOKENS, VOCABULARY = 4, 128, 4096
Factory = Callable[..., torch.optim.Optimizer]

_diloco = partial(StreamingDiLoCoStrategy, sync_every=SYNC_EVERY)
ROWS: dict[str, tuple[str, Callable[[], Any], Factory]] = {
    "sync_cost": ("1gbit", partial(_diloco, overlap_steps=0), torch.optim.AdamW),
    "lion_step": ("1gbit", DistributedLionStrategy, DistributedLion),
    "bandwidth": ("100mbit", partial(_diloco, overlap_steps=2), torch.optim.AdamW),
}


class Model(pl.LightningModule):
    """GPT-2 with 5.8 million parameters, as in the bandwidth benchmark."""

    def __init__(self, optimizer: Factory) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_layer=6,
            n_embd=256,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model, self._optimizer = GPT2LMHeadModel(config), optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return transformers' own loss."""
        loss: Tensor = self.model(batch[0], labels=batch[0], use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer of this row."""
        return self._optimizer(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    """Record the end time of every batch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def main(row: str, steps: int, out: Path) -> None:
    """Train and write the step times."""
    _, strategy, optimizer = ROWS[row]
    clock, rows = Clock(), torch.randint(VOCABULARY, (2048, TOKENS))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy(),
        max_steps=WARM_UP + steps + 1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(optimizer), DataLoader(TensorDataset(rows), batch_size=BATCH))
    if trainer.is_global_zero:
        ends = clock.ends[WARM_UP : WARM_UP + steps + 1]
        seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        out.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
