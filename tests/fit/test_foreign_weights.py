"""Weights that others write; fits without a step; checkpoints at the edges of a fit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import Recorder, Tiny, assert_same, loader, quiet_trainer
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

STEPS = 6


class MovingAverage(pl.Callback):
    """The usual way to validate with an average: put it in, and take it out again."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.scored: list[Tensor] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict({name: 0.5 * value for name, value in self.kept.items()})

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.scored.append(pl_module.head.weight / self.kept["head.weight"])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.load_state_dict(self.kept)


class NeverRestored(MovingAverage):
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


class WritesLast(pl.Callback):
    """Writes weights after the last step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == STEPS:
            with torch.no_grad():
                module.head.weight.mul_(2.0)


class SavesAtStart(pl.Callback):
    """Writes a checkpoint when an epoch begins, the last one too."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class Pretrained(Tiny):
    """Loads weights when the fit has begun, here even other ones on every rank."""

    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.head.weight.fill_(5.0 + self.global_rank)


class Thawing(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.head.requires_grad_(True)


def fit(size: int, module: Tiny, *extra: pl.Callback, **kwargs: Any) -> tuple[Recorder, str]:
    recorder = Recorder()
    settings = {"sync_every": 4, "num_fragments": 1, "wire_dtype": "fp32", "evaluate": "outer"}
    strategy = StreamingDiLoCoStrategy(**{**settings, **kwargs.pop("settings", {})})
    path = kwargs.pop("ckpt_path", None)
    trainer = quiet_trainer(
        **{
            "strategy": strategy,
            "devices": size,
            "max_steps": STEPS,
            "callbacks": [recorder, *extra],
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in extra),
            "num_sanity_val_steps": 0,
            **kwargs,
        }
    )
    try:
        trainer.fit(module, loader(2 * STEPS * size), loader(4 * size), ckpt_path=path)
    except (ValueError, RuntimeError) as error:
        return recorder, f"{type(error).__name__}: {error}"
    return recorder, ""


def weights(module: Tiny) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    average, averaged, plain = MovingAverage(), Tiny(), Tiny()
    outcomes["average"] = fit(size, averaged, average, val_check_interval=3)[1], average.scored
    outcomes["average, plain"] = weights(averaged), fit(size, plain)[1], weights(plain)
    outcomes["not restored"] = fit(size, Tiny(), NeverRestored(), val_check_interval=5)[1]
    outcomes["written last"] = fit(size, Tiny(), WritesLast())[1]
    pretrained = Pretrained(lr=0.0)  # and no decay: AdamW multiplies it with the learning rate
    outcomes["pretrained"] = fit(size, pretrained)[0].outer[0][0], weights(pretrained)
    # shorter than a cycle: nothing is launched but in the end
    thawing = Thawing()
    outcomes["thawing"] = fit(size, thawing, settings={"sync_every": 50})[1], weights(thawing)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(size, Tiny(), saving)
    nothing_left = Tiny()
    path = folder / "step=3.ckpt"
    outcomes["error"] = fit(size, nothing_left, ckpt_path=path, max_steps=3)[1]
    outcomes["nothing left"] = weights(nothing_left)
    outcomes["saved"] = torch.load(path, weights_only=True)["state_dict"]
    straight, recorded = Tiny(), fit(size, Tiny(), max_steps=-1, max_epochs=2)[0]
    last = ModelCheckpoint(folder / "last", "{step}", every_n_train_steps=STEPS, save_top_k=-1)
    fit(size, straight, last, max_steps=-1, max_epochs=1)
    resumed = Tiny()
    path = folder / "last" / f"step={STEPS}.ckpt"
    fit(size, resumed, ckpt_path=path, max_steps=-1, max_epochs=1)
    outcomes["straight"], outcomes["resumed at the end"] = weights(straight), weights(resumed)
    saved = fit(size, Tiny(), SavesAtStart(folder / "early.ckpt"), max_steps=-1, max_epochs=2)[0]
    outcomes["saved early"] = recorded.local, saved.local
    with resume_warnings() as said:
        path = folder / "step=3.ckpt"
        slower = {"outer_optimizer": partial(torch.optim.SGD, lr=0.1)}
        fit(size, Tiny(), ckpt_path=path, settings=slower)
    outcomes["said"] = said
    return outcomes


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("foreign")
    return run_ranks(play, 2, folder, folder / "checkpoints")


def test_a_callback_may_validate_with_weights_of_its_own(played: Any) -> None:
    """In the middle of the fit and at its end; training continues from the local weights."""
    for rank in played:
        error, scored = rank["average"]
        assert error == ""
        assert len(scored) == 2 * 2, "two validations of two batches"
        assert all(torch.equal(ratio, torch.full_like(ratio, 0.5)) for ratio in scored)
        trained, error, plain = rank["average, plain"]
        assert error == ""
        assert_same(trained, plain)


def test_a_callback_that_leaves_weights_of_its_own_is_refused(played: Any) -> None:
    """Otherwise training would continue from the average."""
    for rank in played:
        assert rank["not restored"].startswith("RuntimeError: The parameters ['embed.weight'")
        assert "restore the previous ones, bit for bit, in" in rank["not restored"]
        assert rank["written last"] == "", "it is local training"


def test_weights_written_in_on_fit_start_are_trained(played: Any) -> None:
    """Rank 0's on all ranks; the outer weights of the first step are these too."""
    for rank in played:
        outer, final = rank["pretrained"]
        assert torch.equal(final["head.weight"], torch.full((1, 6), 5.0))
        assert (outer == 5.0).sum() == 6
        assert torch.equal(final["embed.weight"], Tiny().embed.weight)


def test_a_parameter_that_thaws_in_a_short_fit_is_averaged_at_its_end(played: Any) -> None:
    _, expected = played[0]["thawing"]
    assert not torch.equal(expected["head.weight"], Thawing().head.weight), "it has been trained"
    for rank in played:
        error, found = rank["thawing"]
        assert error == ""
        assert_same(found, expected)


def test_a_resumed_fit_without_steps_leaves_the_outer_weights(played: Any) -> None:
    for rank in played:
        assert rank["error"] == ""
        assert_same(rank["nothing left"], rank["saved"])


def test_a_checkpoint_of_the_last_step_is_not_finished_again(played: Any) -> None:
    """Its validation is still to come, and the outer momentum would move the weights again."""
    for rank in played:
        assert_same(rank["resumed at the end"], rank["straight"])


def test_a_save_when_the_last_epoch_begins_changes_nothing(played: Any) -> None:
    for rank in played:
        plain, saved = rank["saved early"]
        assert len(plain) == len(saved) == 2 * STEPS
        assert_same(saved, plain)


def test_a_resume_with_another_outer_learning_rate_says_so(played: Any) -> None:
    for rank in played:
        (text,) = rank["said"]
        assert "outer_optimizer was SGD {'lr': 0.4," in text
        assert "and is SGD {'lr': 0.1," in text


REFUSED = [
    callbacks.StochasticWeightAveraging(swa_lrs=0.1),
    callbacks.ModelPruning("l1_unstructured", amount=0.5),
]


@pytest.mark.parametrize("callback", REFUSED, ids=lambda c: type(c).__name__)
def test_callbacks_that_cannot_work_are_refused(callback: pl.Callback, tmp_path: Path) -> None:
    """Before anything is trained."""
    ((steps, error),) = run_ranks(with_callback, 1, tmp_path, callback)
    assert error.startswith(
        "ValueError: `StreamingDiLoCoStrategy` does not support the callback"
        f" `{type(callback).__name__}`"
    )
    assert steps == 0


def with_callback(rank: int, size: int, callback: pl.Callback) -> tuple[int, str]:
    recorder, error = fit(size, Tiny(), callback)
    return len(recorder.local), error
