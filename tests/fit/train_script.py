"""A user's script, run by the launch tests: `python train_script.py STRATEGY[,...] OUTPUT_FOLDER`.

With DIES_ONCE in the environment rank 1 kills itself in the middle of the last of its fits, in
torchrun's first attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.fit.models import Tiny, Voter, loader, quiet_trainer


class DieOnce(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and trainer.global_rank == 1 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(name: str, folder: Path, dies: bool) -> None:
    trainer = quiet_trainer(strategy=name, devices=2, max_epochs=1)
    if dies:
        trainer.callbacks.append(DieOnce())
    if name == "domino_tp":
        from tests.fit import causal_lm  # transformers take a second

        module: Any = causal_lm.CausalLM()
        rows = causal_lm.loader(10 * 2, 2), causal_lm.loader(4, 2)
    else:
        module = Voter() if name == "distributed_lion" else Tiny()
        rows = loader(10 * 2 * 2), loader(4)
    trainer.fit(module, *rows)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    outcome = {
        "weights": weights.tolist(),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
    }
    (folder / f"{name}_{trainer.global_rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    for name in names:
        torch.manual_seed(0)
        fit(name, folder, dies="DIES_ONCE" in os.environ and name == names[-1])
