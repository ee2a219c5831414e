"""Checkpoints of ranks that hold shards: full tensors on rank 0, whatever hooks make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from lightning_commfree import DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.layouts.fsdp import why_unavailable
from tests.fit.causal_lm import CausalLM, loader
from tests.fit.models import assert_same, quiet_trainer
from tests.world import run_ranks

KINDS = ["domino", *([] if why_unavailable() else ["fsdp"])]
NAME = "wrapped.lm.transformer.h.0.mlp.c_fc.weight"
CHANGES = ("none", "rename", "remove", "compute")


class Hooked(CausalLM):
    """Its hook looks at a checkpoint, and changes it.

    Attributes:
        change: what is done, one of `CHANGES`.
        seen: of every save, how many weights there were.
    """

    def __init__(self) -> None:
        super().__init__("gpt2")
        self.change = CHANGES[0]
        self.seen: list[int] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen.append(len(state))
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

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step < 2:
            return
        for module.change in CHANGES:
            trainer.save_checkpoint(self.folder / f"{module.change}.ckpt")
        module.change = CHANGES[0]


def fit(kind: str, size: int, folder: Path, **settings: Any) -> list[int]:
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
    trainer.save_checkpoint(folder / "after.ckpt")
    return module.seen


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


def saved(played: Any, kind: str, plugin: str, change: str) -> Any:
    return torch.load(played[1] / kind / plugin / f"{change}.ckpt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_alone_gets_full_tensors(played: Any, kind: str) -> None:
    first, other = (rank[kind, "ours"] for rank in played[0])
    count = len(CausalLM("gpt2").state_dict())
    assert first == [count] * (len(CHANGES) + 1)
    assert set(other[: len(CHANGES)]) == {0}
    expected = {name: tensor.shape for name, tensor in CausalLM("gpt2").state_dict().items()}
    for change in ("none", "after"):
        state: dict[str, Tensor] = saved(played, kind, "ours", change)["state_dict"]
        assert {name: tensor.shape for name, tensor in state.items()} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_behind_the_fit_is_that_of_its_last_step(played: Any, kind: str) -> None:
    within, behind = (saved(played, kind, "ours", change) for change in ("none", "after"))
    for key in ("state_dict", "optimizer_states"):
        assert_same(behind[key], within[key])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_weight_is_in_the_file_once(played: Any, kind: str) -> None:
    state = saved(played, kind, "ours", "none")["state_dict"]
    head, embedding = (state[f"wrapped.lm.{n}.weight"] for n in ("lm_head", "transformer.wte"))
    assert head.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_another_plugin_writes(played: Any, kind: str) -> None:
    ours, users = (saved(played, kind, plugin, "none") for plugin in ("ours", "users"))
    torch.testing.assert_close(ours["state_dict"], users["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer_states"], users["optimizer_states"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_rename_remove_and_compute(played: Any, kind: str) -> None:
    whole, renamed, removed, computed = (
        saved(played, kind, "ours", change)["state_dict"] for change in CHANGES
    )
    assert renamed.keys() == whole.keys() - {NAME} | {"renamed", "own"}
    assert torch.equal(renamed["renamed"], whole[NAME])
    assert removed.keys() == {NAME}
    assert torch.equal(removed[NAME], whole[NAME])
    assert torch.equal(computed[NAME], whole[NAME].half())
