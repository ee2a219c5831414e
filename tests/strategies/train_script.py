"""A user's script, run by the launch tests: `python train_script.py STRATEGY OUTPUT_FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from lightning_commfree import StreamingDiLoCoStrategy
from tests.strategies.models import Tiny, loader, quiet_trainer

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    strategy = StreamingDiLoCoStrategy(start_method="spawn") if name == "instance" else name
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1)
    module = Tiny()
    trainer.fit(module, loader(10 * 2 * 2), loader(4))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    outcome = {
        "weights": weights.tolist(),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
    }
    (folder / f"{name}_{trainer.global_rank}.json").write_text(json.dumps(outcome))
