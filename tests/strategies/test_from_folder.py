"""Ranks that share a model read it from a Hugging Face folder when they divide it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_commfree import (
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
    from_pretrained_on_meta,
)
from lightning_commfree.model.fsdp import why_unavailable
from tests.strategies.causal_lm import CausalLM, loader, make
from tests.strategies.models import quiet_trainer
from tests.world import run_ranks

CELLS = [("domino", "llama"), *([] if why_unavailable() else [("fsdp", "gpt2")])]


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


def fit(layout: str, kind: str, size: int, folder: Path) -> Any:
    strategy: Any = (
        DominoTPStrategy(tensor_parallel_size=2, split="none")
        if layout == "domino"
        else StreamingDiLoCoStrategy(replica_size=2, inside="fsdp", sync_every=2)
    )
    save = Save(folder / f"{kind} {layout}.ckpt")
    trainer = quiet_trainer(strategy=strategy, max_steps=2, devices=size, callbacks=[save])
    module = FromFolder(folder / kind)
    trainer.fit(module, loader(8 * size, 2))
    return float(trainer.callback_metrics["loss"])


def every_cell(rank: int, size: int, folder: Path) -> Any:
    return {(layout, kind): fit(layout, kind, size, folder) for layout, kind in CELLS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With checkpoints of all cells, and the models that they began with."""
    folder = tmp_path_factory.mktemp("models")
    for _, kind in CELLS:
        make(kind).save_pretrained(folder / kind)
    losses = run_ranks(every_cell, 4, tmp_path_factory.mktemp("four"), folder)
    assert all(torch.tensor(list(rank.values())).isfinite().all() for rank in losses)
    return folder


@pytest.mark.parametrize(("layout", "kind"), CELLS)
def test_the_values_of_the_folder_are_trained(folder: Path, layout: str, kind: str) -> None:
    state = torch.load(folder / f"{kind} {layout}.ckpt", weights_only=True)["state_dict"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / kind)
    assert state.keys() == {f"wrapped.lm.{name}" for name in loaded.state_dict()}
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(state[f"wrapped.lm.{name}"], tensor), name
