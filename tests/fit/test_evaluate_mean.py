"""`evaluate="mean"`: validations and their checkpoints hold the mean of the local weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import Recorder, Tiny, assert_same, loader, quiet_trainer, rank_loader
from tests.world import run_ranks

STEPS = 12
SETTINGS: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "overlap_steps": 3}


class Validated(Recorder):
    """Keeps the weights with which the model is validated, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, dict[str, Tensor]]] = []

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        self.validated.append((trainer.global_step, state))


def fit_one(rank: int, size: int, folder: Path, evaluate: str, resume: str | None = None) -> Any:
    """Validate after steps 2, 4, ..., save for each of these, and after steps 3, 6, ..."""
    recorder, keep = Validated(), -1 if resume is None else 0
    scored = ModelCheckpoint(
        folder / evaluate,
        "scored-{step}",
        monitor="val_loss",
        save_top_k=keep,
    )
    often = ModelCheckpoint(folder / evaluate, "{step}", every_n_train_steps=3, save_top_k=keep)
    strategy = StreamingDiLoCoStrategy(**SETTINGS, evaluate=evaluate)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        val_check_interval=2,
        enable_checkpointing=True,
        callbacks=[recorder, scored, often],
    )
    module = Tiny()
    path = None if resume is None else folder / evaluate / resume
    trainer.fit(module, rank_loader(STEPS * 2 * size, 2, rank, size), loader(4), ckpt_path=path)
    sent = {phase: dict(sent) for phase, sent in strategy.ledger.bytes_by_phase.items()}
    return recorder.local, recorder.validated, sent


def fits(rank: int, size: int, folder: Path) -> Any:
    return {
        "outer": fit_one(rank, size, folder, "outer"),
        "mean": fit_one(rank, size, folder, "mean"),
        "resumed": fit_one(rank, size, folder, "mean", "scored-step=6.ckpt"),
        "resumed between": fit_one(rank, size, folder, "mean", "step=9.ckpt"),
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("evaluate")
    return run_ranks(fits, 2, folder, folder), folder


def test_evaluating_the_mean_does_not_change_training(played: Any) -> None:
    for rank in played[0]:
        assert len(rank["mean"][0]) == STEPS
        assert_same(rank["mean"][0], rank["outer"][0])


def test_a_validation_sees_the_mean_of_the_local_weights(played: Any) -> None:
    """The sanity check sees the common start, and the last validation the end of the fit."""
    first, second = played[0]
    assert [step for step, _ in first["mean"][1]] == [0, 2, 4, 6, 8, 10, 12]
    for (step, shown), (_, other) in zip(first["mean"][1], second["mean"][1], strict=True):
        for name, tensor in shown.items():
            assert torch.equal(tensor, other[name]), "equal on all ranks"
            if step:
                mean = (first["mean"][0][step - 1][name] + second["mean"][0][step - 1][name]) / 2
                torch.testing.assert_close(tensor, mean, rtol=0, atol=1.5e-2)
    # the outer weights have not moved after 4 steps
    initial, early = first["outer"][1][0][1], first["outer"][1][2][1]
    assert all(torch.equal(early[name], initial[name]) for name in initial)
    assert not torch.equal(first["mean"][1][2][1]["head.weight"], initial["head.weight"])


def test_checkpoints_hold_the_validated_weights(played: Any) -> None:
    ranks, folder = played
    shown = dict(ranks[0]["mean"][1])
    for step in (2, 4, 6, 8, 10):
        saved = torch.load(folder / "mean" / f"scored-step={step}.ckpt", weights_only=True)
        assert_same(saved["state_dict"], shown[step])
    saved = torch.load(folder / "mean" / "step=9.ckpt", weights_only=True)["state_dict"]
    for name, tensor in saved.items():  # without a validation at its step
        mean = sum(rank["mean"][0][8][name] for rank in ranks) / 2
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1.5e-2)


@pytest.mark.parametrize(("name", "step"), [("resumed", 6), ("resumed between", 9)])
def test_resume_is_exact(played: Any, name: str, step: int) -> None:
    for rank in played[0]:
        assert len(rank[name][0]) == STEPS - step
        assert_same(rank[name][0], rank["mean"][0][step:])


def test_evaluation_bytes_are_counted_separately(played: Any) -> None:
    """One for each validation, and for each checkpoint outside of one, even after the same step."""
    for rank in played[0]:
        mean, outer = rank["mean"][2], rank["outer"][2]
        validations = mean["validation"].pop("evaluation")
        assert validations / 5 == mean["end"].pop("evaluation") / 3 > 0
        assert mean["steps"] == outer["steps"]
        assert mean["end"]["outer_gradient"] == outer["end"]["outer_gradient"]
        assert not any("evaluation" in sent for sent in outer.values())
