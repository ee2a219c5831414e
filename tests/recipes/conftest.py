"""What the tests of the recipes share: a small corpus, composed configurations, a quiet Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from recipes.data.corpus import TextFiles

# A test that computes with several threads and then forks would hang: OpenMP's threads do not
# survive a fork. OMP_NUM_THREADS, set after torch was imported, comes too late for this process.
torch.set_num_threads(1)

CONF = Path(__file__).parents[2] / "conf"
TRAIN_TEXT = "".join(f"{i} green bottles hanging on the wall\n" for i in range(400))
VALIDATION_TEXT = "".join(f"{i} brown bottles standing on the floor\n" for i in range(60))


@pytest.fixture
def corpus(tmp_path: Path) -> TextFiles:
    (tmp_path / "train.txt").write_text(TRAIN_TEXT)
    (tmp_path / "validation.txt").write_text(VALIDATION_TEXT)
    return TextFiles(str(tmp_path / "train.txt"), str(tmp_path / "validation.txt"))


@pytest.fixture
def compose_config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Compose `conf/pretrain.yaml` with overrides, as a run would, into plain dicts and lists."""

    def composed(*overrides: str) -> dict[str, Any]:
        folders = [f"run_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("pretrain", [*folders, *overrides])
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)

    return composed


@pytest.fixture
def quiet_trainer() -> Callable[..., Trainer]:
    """Make a Trainer on the CPU that writes and prints nothing unless it is told to."""

    def trainer(**kwargs: Any) -> Trainer:
        silent = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**silent, **kwargs})

    return trainer
