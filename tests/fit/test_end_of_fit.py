"""However a fit ends, the last checkpoint holds what the model in memory holds: the final outer
weights. A file that was saved before a later callback stops the fit holds those of its moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.any_strategy import Voter, make_strategy
from tests.fit.models import Noisy, Tiny, assert_same, loader, quiet_trainer
from tests.world import run_ranks

STEPS_PER_EPOCH = 10


class StopIn(pl.Callback):
    """Sets `trainer.should_stop` in one hook of the second epoch: before, between or after
    Lightning's saves."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._stop)

    def _stop(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            trainer.should_stop = True


class EmptyEpoch(Tiny):
    """Skips what is left of the last epoch, so that its last step was not the last batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 4 else None


# name: Trainer arguments, ModelCheckpoint arguments, callbacks
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
    "max_steps, saved every step": ({"max_steps": 17}, {"every_n_train_steps": 1}, []),
    "max_steps, saved never but last": (
        {"max_steps": 17},
        {"save_top_k": 0, "save_last": True, "every_n_train_steps": 1},
        [],
    ),
    "max_epochs, saved after validation": (
        {"max_epochs": 2, "val_check_interval": 5},
        {"monitor": "val_loss", "save_top_k": -1, "save_last": "link"},
        [],
    ),
    "accumulation": ({"max_epochs": 2, "accumulate_grad_batches": 3}, {"save_last": True}, []),
    "early stopping": (
        {"max_epochs": 9},
        {},
        [lambda: EarlyStopping("val_loss", stopping_threshold=1e9)],
    ),
    "should_stop after a batch": (
        {"max_epochs": 9},
        {"every_n_train_steps": 1},
        [lambda: StopIn("on_train_batch_end")],
    ),
    "should_stop in validation": (
        {"max_epochs": 9},
        {"save_on_train_epoch_end": False},
        [lambda: StopIn("on_validation_end")],
    ),
    "timer": (
        {"max_epochs": 9},
        {"save_last": True},
        [lambda: Timer(duration={"milliseconds": 1})],
    ),
    "the epoch is cut short": ({"max_epochs": 2}, {}, []),
    "min_steps": ({"max_epochs": 9, "min_steps": 25}, {}, [lambda: StopIn("on_train_epoch_end")]),
}


# a callback stops the fit after the save of the same step
LATE: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
    "should_stop when all is saved": (
        {"max_epochs": 9, "val_check_interval": 5},
        {"save_on_train_epoch_end": False, "save_top_k": -1, "save_last": True},
        [lambda: StopIn("on_train_epoch_end")],
    ),
    "weights only": (
        {"max_epochs": 9, "val_check_interval": 5},
        {"save_on_train_epoch_end": False, "save_weights_only": True},
        [lambda: StopIn("on_train_epoch_end")],
    ),
}

# early stopping before the last save: what else is saved beside the scored files
SCORED: dict[str, dict[str, Any]] = {
    "a link to the scored one": {"save_last": "link"},
    "a last one": {"save_last": True, "save_top_k": 2},
    "without trainer state": {"save_last": "link", "save_weights_only": True, "save_top_k": -1},
}


FITS = {**CASES, **LATE}


def fit(rank: int, size: int, folder: Path) -> dict[str, Any]:
    ends = {name: fit_one(size, folder / str(i), name) for i, name in enumerate(FITS)}
    return {**ends, **{name: fit_scored(size, folder / name, SCORED[name]) for name in SCORED}}


def fit_scored(size: int, folder: Path, saving: dict[str, Any]) -> Any:
    """Return the weights in the end and what a `ModelCheckpoint` says that its files score."""
    strategy = StreamingDiLoCoStrategy(
        sync_every=6, num_fragments=2, wire_dtype="fp32", evaluate="outer"
    )
    scored = ModelCheckpoint(
        dirpath=folder, monitor="val_loss", filename="{val_loss:.9f}", **saving
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=9,
        val_check_interval=5,
        enable_checkpointing=True,
        callbacks=[
            EarlyStopping("val_loss", stopping_threshold=1e9, check_on_train_epoch_end=False),
            scored,
            ModelCheckpoint(dirpath=folder / "unscored", save_on_train_epoch_end=False),
        ],
    )
    module = Tiny()
    trainer.fit(module, loader(STEPS_PER_EPOCH * 2 * size), loader(8))
    scores = {path: float(score) for path, score in scored.best_k_models.items()}
    return {name: p.detach().clone() for name, p in module.named_parameters()}, scores


def fit_one(size: int, folder: Path, name: str) -> Any:
    arguments, saving, callbacks = FITS[name]
    checkpoint = ModelCheckpoint(dirpath=folder, **saving)
    strategy = StreamingDiLoCoStrategy(
        sync_every=6, num_fragments=2, overlap_steps=2, wire_dtype="fp32", evaluate="outer"
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        enable_checkpointing=True,
        callbacks=[make() for make in callbacks] + [checkpoint],
        **arguments,
    )
    module = EmptyEpoch() if "cut short" in name else Tiny()
    trainer.fit(module, loader(STEPS_PER_EPOCH * 2 * size), loader(8))
    validated = float(trainer.callback_metrics["val_loss"])
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return weights, validated, trainer.global_step


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("end_of_fit")
    return run_ranks(fit, 2, folder, folder / "checkpoints"), folder / "checkpoints"


@pytest.mark.parametrize("name", list(CASES))
def test_the_last_checkpoint_is_the_model_in_memory(outcomes: Any, name: str) -> None:
    ranks, folder = outcomes
    weights: dict[str, Tensor] = ranks[0][name][0]
    for other in ranks[1:]:
        assert_same(other[name][0], weights)
    files = sorted((folder / str(list(CASES).index(name))).glob("*.ckpt"))
    steps = {file: torch.load(file, weights_only=True) for file in files}
    newest = max(int(saved["global_step"]) for saved in steps.values())
    last = {file: saved for file, saved in steps.items() if saved["global_step"] == newest}
    assert newest == ranks[0][name][2], "every case saves at its last step"
    for saved in last.values():
        assert_same(saved["state_dict"], weights)


def test_a_plain_trainer_gets_the_same_loss_from_the_last_checkpoint(outcomes: Any) -> None:
    """Also: where the end could be foreseen, the last validation of the fit saw the final
    weights."""
    ranks, folder = outcomes
    name = "max_epochs, saved after validation"
    newest = max(
        (folder / str(list(CASES).index(name))).glob("epoch*.ckpt"), key=lambda f: f.stat().st_mtime
    )
    module = Tiny.load_from_checkpoint(newest)
    plain = quiet_trainer().validate(module, loader(8), verbose=False)[0]["val_loss"]
    assert plain == pytest.approx(ranks[0][name][1], rel=1e-6)


@pytest.mark.parametrize("name", list(LATE))
def test_a_file_saved_before_a_late_stop_holds_the_outer_weights_of_its_step(
    outcomes: Any, name: str
) -> None:
    ranks, folder = outcomes
    weights = ranks[0][name][0]
    files = list((folder / str(list(FITS).index(name))).glob("*.ckpt"))
    assert files
    for file in files:
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert saved.keys() == weights.keys()
        assert not torch.equal(saved["head.weight"], weights["head.weight"])


@pytest.mark.parametrize("name", list(SCORED))
def test_a_file_under_a_score_validates_to_it(outcomes: Any, name: str) -> None:
    ranks, folder = outcomes
    weights, scores = ranks[0][name]
    assert scores
    for path, score in scores.items():
        module = Tiny.load_from_checkpoint(path)
        plain = quiet_trainer().validate(module, loader(8), verbose=False)[0]["val_loss"]
        assert plain == pytest.approx(score, rel=1e-6)
        assert not torch.equal(module.head.weight, weights["head.weight"]), "the fit ended later"


def step_by_hand(rank: int, size: int, kind: str) -> tuple[Tensor, Tensor]:
    """Run a training step of Lightning's own loop after the fit, as some test suites do."""
    strategy = make_strategy(kind, size)
    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=2)
    module = Voter() if kind == "lion" else Noisy()
    trainer.fit(module, loader(8))

    trainer.state.stage = RunningStage.TRAINING
    before = next(module.parameters()).detach().clone()
    batch = {"batch": next(iter(loader(8))), "batch_idx": 0}
    trainer.fit_loop.epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, batch)
    return before, next(module.parameters()).detach()


@pytest.mark.parametrize("kind", ["diloco", "lion"])
def test_a_step_by_hand_after_fit_trains_the_module(kind: str, tmp_path: Path) -> None:
    ((before, after),) = run_ranks(step_by_hand, 1, tmp_path, kind)
    assert not torch.equal(before, after)
