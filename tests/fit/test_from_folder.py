"""Ranks of a tensor group read a model from a Hugging Face folder when they divide it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM

from lightning_commfree import DominoTPStrategy, from_pretrained_on_meta
from tests.fit.causal_lm import CausalLM, loader, make
from tests.fit.models import quiet_trainer
from tests.world import run_ranks


class FromFolder(CausalLM):
    """Its model is in a folder; training does not change its weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.wrapped, self.folder = torch.nn.ModuleDict(), folder

    def configure_model(self) -> None:
        if "lm" not in self.wrapped:
            self.wrapped["lm"] = from_pretrained_on_meta(AutoModelForCausalLM, self.folder)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Save(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fit(rank: int, size: int, folder: Path) -> float:
    trainer = quiet_trainer(
        strategy=DominoTPStrategy(tensor_parallel_size=2, split="none"),
        max_steps=2,
        devices=size,
        callbacks=[Save(folder / "saved.ckpt")],
    )
    trainer.fit(FromFolder(folder), loader(8 * size, 2))
    return float(trainer.callback_metrics["loss"])


def test_the_values_of_the_folder_are_trained(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    assert torch.tensor(run_ranks(fit, 4, tmp_path, tmp_path)).isfinite().all()
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert state.keys() == {f"wrapped.lm.{name}" for name in loaded.state_dict()}
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(state[f"wrapped.lm.{name}"], tensor), name
