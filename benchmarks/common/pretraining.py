"""Runs of `recipes.pretrain`: in subprocesses, or their parts for a simulation in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from omegaconf import OmegaConf
from torch import Tensor, nn

from recipes.data.resumable import ResumableDataLoader
from recipes.data.training_data import TrainingData
from recipes.training.language_model import LanguageModel
from recipes.training.report import SUMMARY_FILE

CONF = Path(__file__).parents[2] / "conf"
Config = dict[str, Any]


def summary_of(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `recipes.pretrain` once and return its summary.

    Raises:
        subprocess.CalledProcessError: the job failed; it has printed the reason.
    """
    command = [sys.executable, "-m", "recipes.pretrain", *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    return summary


def composed(words: Sequence[str]) -> Config:
    """Return the configuration of `recipes.pretrain` with these overrides, as plain values."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        # nothing is written to the run's folder, so it needs no real name
        config = compose("pretrain", ["run_dir=none", *words])
    return cast(Config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def batches(data: TrainingData, steps: int) -> Iterator[Any]:
    """Yield training batches for `steps` steps, epoch after epoch, as a Trainer would."""
    loader = cast(ResumableDataLoader, data.train_dataloader())
    epoch = 0
    while steps > 0:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            if steps == 0:
                return
            yield batch
            steps -= 1
        epoch += 1


def take_steps(
    modules: Sequence[LanguageModel], made: Sequence[Any], batch: Tensor, clip: float | None
) -> None:
    """Take an inner step on every replica.

    Args:
        modules: one per replica.
        made: their optimizers and schedules, as returned by `configure_optimizers`.
        batch: int64, shape (blocks of all replicas, block_size + 1). Replica m takes blocks m,
            m + M, and so on, like `DistributedSampler`.
        clip: largest norm of a replica's gradient; None: no clipping.
    """
    assert len(batch) % len(modules) == 0, "all replicas need batches of the same size"
    for m, (module, of_module) in enumerate(zip(modules, made, strict=True)):
        optimizer = of_module["optimizer"]
        optimizer.zero_grad()
        module.loss(batch[m :: len(modules)]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        cast(LRSchedulerConfigType, of_module["lr_scheduler"])["scheduler"].step()
