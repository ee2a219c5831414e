"""Fits in workers of Ray Train, and the same fits without Ray, which `test_ray.py` compares.

    python tests/ray_cases.py FOLDER

The first is the script in `FOLDER/script.py`; the others follow it in the same workers. In the last
epoch of the script, one worker is killed, once.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import ray
import torch
from ray.train import torch as ray_torch
from ray.train.lightning import RayLightningEnvironment, prepare_trainer

from lightning_commfree import DistributedLionStrategy, DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.ray import RayDistributedLionStrategy, RayDominoTPStrategy
from tests.fit import causal_lm
from tests.fit.models import Voter, loader, quiet_trainer

OTHERS: dict[str, Any] = {  # strategies without Ray and with it, and what makes module and data
    "lion": (DistributedLionStrategy, RayDistributedLionStrategy, lambda: (Voter(), loader(16))),
    "domino": (
        partial(DominoTPStrategy, split="batch"),
        partial(RayDominoTPStrategy, split="batch"),
        lambda: (causal_lm.CausalLM(), causal_lm.loader(16, 4)),
    ),
}
FORKED: Any = {"devices": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}


class Watch(lightning.Callback):
    """Notes in which epoch a fit begins, kills rank 1 once, and saves the weights at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            with (self.folder / "began").open("a") as file:
                file.write(f"{trainer.current_epoch}\n")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        killed = self.folder / "killed"
        place = trainer.global_rank, trainer.current_epoch, batch_idx
        if place == (1, 3, 30) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        save(self.folder / f"diloco_{trainer.global_rank}.pt", module)


def save(path: Path, module: Any) -> None:
    torch.save(module.state_dict(), path)


def in_worker(train: Callable[[], None], folder: Path) -> None:
    """Run the script's function with a callback more, then the other fits."""
    make = lightning.Trainer
    lightning.Trainer = lambda callbacks, **arguments: make(
        callbacks=[*callbacks, Watch(folder)],
        logger=False,
        enable_progress_bar=False,
        **arguments,
    )
    train()
    lightning.Trainer = make
    rank = ray.train.get_context().get_world_rank()
    for name, (_, strategy, make_parts) in OTHERS.items():
        module, data = make_parts()
        trainer = quiet_trainer(
            strategy=strategy(), plugins=[RayLightningEnvironment()], max_epochs=2
        )
        prepare_trainer(trainer).fit(module, data)
        save(folder / f"{name}_{rank}.pt", module)


def without_ray(script: dict[str, Any], folder: Path) -> None:
    lightning.seed_everything(1)
    strategy: Any = StreamingDiLoCoStrategy(sync_every=20, start_method="fork")
    module = script["Regression"]()
    lightning.Trainer(**FORKED, strategy=strategy, max_epochs=4).fit(module)
    save(folder / "diloco.pt", module)
    for name, (make_strategy, _, make_parts) in OTHERS.items():
        module, data = make_parts()
        strategy = make_strategy(start_method="fork")
        quiet_trainer(strategy=strategy, devices=2, max_epochs=2).fit(module, data)
        save(folder / f"{name}.pt", module)


def main() -> None:
    folder = Path(sys.argv[1])
    script = folder / "script.py"
    without_ray(runpy.run_path(str(script)), folder)

    ray.init(num_cpus=2, include_dashboard=False)
    make = ray_torch.TorchTrainer

    def make_watched(train: Any, run_config: Any, **arguments: Any) -> Any:
        run_config.storage_path = str(folder)
        return make(partial(in_worker, train, folder), run_config=run_config, **arguments)

    ray_torch.TorchTrainer = make_watched
    result = runpy.run_path(str(script), run_name="__main__")["result"]
    files = Path(result.checkpoint.path).rglob("*.*")
    torch.save(
        {"metrics": result.metrics, "files": {file.name for file in files}}, folder / "result.pt"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
