"""What the end of a Domino fit sends and leaves: the model whole, the optimizer's state in parts,
which a later checkpoint puts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_commfree import DominoTPStrategy
from lightning_commfree.comm.ledger import END, all_gather_bytes
from lightning_commfree.domino.sharded_module import STATE_TAG
from tests.strategies.causal_lm import CausalLM, loader
from tests.strategies.models import assert_same, quiet_trainer
from tests.world import run_ranks

STEPS = 2
SIZE = 4
GROUPS = (2, 4)  # tensor parallel sizes


class Weighed(CausalLM):
    """Keeps the bytes of a rank's parts of what is divided."""

    def on_train_start(self) -> None:
        self.parts = {p: p.shape for p in self.trainer.strategy.inside.sharded.specs}
        self.part_bytes = sum(p.nbytes for p in self.parts)


def fit(folder: Path, group: int) -> dict[str, Any]:
    strategy, module = DominoTPStrategy(group), Weighed()
    callbacks = [ModelCheckpoint(folder, "in_the_fit", every_n_train_steps=STEPS)]
    trainer = quiet_trainer(
        strategy=strategy,
        devices=SIZE,
        max_steps=STEPS,
        enable_checkpointing=group == 2,
        callbacks=callbacks if group == 2 else [],
    )
    trainer.fit(module, loader(32 * SIZE, 2))
    sent = strategy.ledger.bytes_by_phase[END][STATE_TAG]
    (optimizer,) = trainer.optimizers
    held = {p: state["exp_avg"].shape for p, state in optimizer.state.items() if p in module.parts}
    trainer.save_checkpoint(folder / "behind_the_fit.ckpt")
    return {
        "sent": sent,
        "model": all_gather_bytes(module.part_bytes, group),
        "in parts": held == module.parts,
        "whole": [p.shape for p in module.parameters()],
        "open": strategy.ranks.is_open,
    }


def play(rank: int, size: int, folder: Path) -> dict[int, Any]:
    return {group: fit(folder / str(group), group) for group in GROUPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[int, Any]]:
    return run_ranks(play, SIZE, folder, folder)


def test_a_fit_without_a_checkpoint_sends_the_model_alone(ranks: list[dict[int, Any]]) -> None:
    for outcomes in ranks:
        found = outcomes[4]
        assert 0 < found["model"] == found["sent"]
        assert found["in parts"]
        assert found["whole"] == [p.shape for p in CausalLM().parameters()]


def test_a_checkpoint_behind_the_fit_is_that_of_its_last_step(
    ranks: list[dict[int, Any]], folder: Path
) -> None:
    assert not any(outcomes[group]["open"] for outcomes in ranks for group in GROUPS)
    names = ("in_the_fit.ckpt", "behind_the_fit.ckpt")
    within, behind = (torch.load(folder / "2" / name, weights_only=True) for name in names)
    assert_same(behind["state_dict"], within["state_dict"])
    (first,), (second,) = within["optimizer_states"], behind["optimizer_states"]
    assert first["param_groups"] == second["param_groups"]
    parameters: list[nn.Parameter] = list(CausalLM().parameters())
    for index, state in first["state"].items():
        assert state["exp_avg"].shape == parameters[index].shape
        assert_same(second["state"][index], state)
