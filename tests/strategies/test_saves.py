"""Checkpoints of ranks that hold parts: written tensor by tensor, whatever hooks make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from lightning_commfree import DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.model.fsdp import why_not_divided
from lightning_commfree.model.shards import SAVE_TAG, is_stand_in
from tests.strategies.causal_lm import CausalLM, loader
from tests.strategies.models import quiet_trainer
from tests.world import run_ranks

KINDS = ["domino", *([] if why_not_divided() else ["fsdp"])]
NAME = "wrapped.lm.transformer.h.0.mlp.c_fc.weight"
CHANGES = ("none", "rename", "remove", "compute")


class Hooked(CausalLM):
    """Its hook looks at a checkpoint, and changes it.

    Attributes:
        change: what is done, one of `CHANGES`.
        seen: of every save, how many weights there were, and whether one was a stand-in.
    """

    def __init__(self) -> None:
        super().__init__("gpt2")
        self.change = CHANGES[0]
        self.seen: list[tuple[int, bool]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen.append((len(state), is_stand_in(state.get(NAME))))
        if not state:  # as on all ranks but the first
            return
        if self.change == "rename":
            state["renamed"] = state.pop(NAME)
            state["own"] = torch.ones(3)
        elif self.change == "remove":
            checkpoint["state_dict"] = {NAME: state[NAME]}
        elif self.change == "compute":
            state[NAME] = state[NAME].half()


class Save(pl.Callback):
    """Saves after the second step, once for every change of the hook."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step < 2:
            return
        for module.change in CHANGES:
            try:
                trainer.save_checkpoint(self.folder / f"{module.change}.ckpt")
            except RuntimeError as error:
                self.errors[module.change] = str(error)
        module.change = CHANGES[0]


def fit(kind: str, size: int, folder: Path, **settings: Any) -> Any:
    strategy: Any = (
        DominoTPStrategy(tensor_parallel_size=size, split="none")
        if kind == "domino"
        else StreamingDiLoCoStrategy(replica_size=size, inside="fsdp", sync_every=2)
    )
    save, module = Save(folder), Hooked()
    trainer = quiet_trainer(
        strategy=strategy, max_steps=2, devices=size, callbacks=[save], **settings
    )
    trainer.fit(module, loader(8 * size, 2))
    asked = strategy.group_ledger.bytes_by_tag[SAVE_TAG]
    trainer.save_checkpoint(folder / "after.ckpt")
    return {"seen": module.seen, "errors": save.errors, "asked": asked}


def every_kind(rank: int, size: int, folder: Path) -> Any:
    return {
        (kind, plugin): fit(
            kind,
            size,
            folder / kind / plugin,
            **({"plugins": [TorchCheckpointIO()]} if plugin == "users" else {}),
        )
        for kind in KINDS
        for plugin in ("ours", "users")
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    return run_ranks(every_kind, 2, tmp_path_factory.mktemp("two"), folder), folder


def state_of(played: Any, kind: str, plugin: str, change: str) -> dict[str, Tensor]:
    path = played[1] / kind / plugin / f"{change}.ckpt"
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_holds_what_is_written(played: Any, kind: str) -> None:
    first, other = (rank[kind, "ours"] for rank in played[0])
    count = len(state_of(played, kind, "ours", "none"))
    assert first["seen"] == [(count, True)] * len(CHANGES) + [(count, False)], "whole after the fit"
    assert {seen for seen, _ in other["seen"][: len(CHANGES)]} == {0}
    assert first["asked"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_another_plugin_writes(played: Any, kind: str) -> None:
    """That one gets all tensors at once."""
    ours, users = (
        torch.load(played[1] / kind / plugin / "none.ckpt", weights_only=True)
        for plugin in ("ours", "users")
    )
    torch.testing.assert_close(ours["state_dict"], users["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer_states"], users["optimizer_states"], rtol=0, atol=0)
    for rank in played[0]:
        assert not any(stand_in for _, stand_in in rank[kind, "users"]["seen"])
        assert not rank[kind, "users"]["errors"]
        assert rank[kind, "users"]["asked"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_rename_and_remove(played: Any, kind: str) -> None:
    whole = state_of(played, kind, "ours", "none")
    renamed = state_of(played, kind, "ours", "rename")
    assert renamed.keys() == whole.keys() - {NAME} | {"renamed", "own"}
    assert torch.equal(renamed["renamed"], whole[NAME])
    removed = state_of(played, kind, "ours", "remove")
    assert removed.keys() == {NAME}
    assert torch.equal(removed[NAME], whole[NAME])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_computes_is_refused_on_all_ranks(played: Any, kind: str) -> None:
    for rank in played[0]:
        (error,) = rank[kind, "ours"]["errors"].values()
        assert "in the checkpoint has no values: a hook has computed" in error
    assert not (played[1] / kind / "ours" / "compute.ckpt").exists()
    assert state_of(played, kind, "users", "compute")[NAME].dtype == torch.float16
