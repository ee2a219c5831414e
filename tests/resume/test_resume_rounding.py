"""A resume is exact where rounding, a conversion or an average could make a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_commfree import DistributedLionStrategy, DominoTPStrategy, StreamingDiLoCoStrategy
from tests.fit import causal_lm
from tests.fit.models import Tiny, Voter, assert_same, dataset, quiet_trainer
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

STEPS, AT = 8, 4


class Wide(Tiny):
    """Wide enough for an all-reduce of three ranks to round by a value's place in a bucket."""

    def __init__(self) -> None:
        super().__init__(width=40)


class Normalized(Voter):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Saves(pl.Callback):
    def __init__(self, path: Path | None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.path is not None and trainer.global_step == AT:
            trainer.save_checkpoint(self.path)


def fit(strategy: Any, module: Any, size: int, path: Path | None = None, **kwargs: Any) -> Any:
    """Train; return the module's state and what a resume said about itself."""
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=STEPS,
        callbacks=[Saves(path)],
        **kwargs.pop("on", {}),
    )
    is_lm = isinstance(module, causal_lm.CausalLM)
    data = causal_lm.words(8 * STEPS) if is_lm else dataset(2 * STEPS * size)
    torch.manual_seed(3)
    with resume_warnings() as said:
        trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), **kwargs)
    return {name: value.clone() for name, value in module.state_dict().items()}, said


DOUBLE: dict[str, Any] = {"precision": "64-true"}
CASES: dict[str, Any] = {
    "lion": (DistributedLionStrategy, Voter, DOUBLE),
    "domino": (lambda: DominoTPStrategy(2, "batch"), causal_lm.CausalLM, DOUBLE),
    "diloco": (lambda: StreamingDiLoCoStrategy(2, 2), Tiny, DOUBLE),
    "batch norm": (DistributedLionStrategy, Normalized, {}),
}
STATIC = {"static_graph": True}


def diloco_of_all(size: int, **ddp: Any) -> StreamingDiLoCoStrategy:
    return StreamingDiLoCoStrategy(2, 2, replica_size=size, **ddp)


def compare(folder: Path, make: Any, module: Any, size: int, on: Any) -> Any:
    """Return the end of a fit that saves, of one resumed there, and of one that never saves."""
    path = folder / "at.ckpt"
    saved, _ = fit(make(), module(), size, path, on=on)
    resumed, said = fit(make(), module(), size, on=on, ckpt_path=path)
    plain, _ = fit(make(), module(), size, on=on)
    return saved, resumed, plain, said


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    if size == 3:
        made = {"ddp": lambda: diloco_of_all(size), "static": lambda: diloco_of_all(size, **STATIC)}
        return {name: compare(folder, make, Wide, size, {}) for name, make in made.items()}
    return {
        name: compare(folder, make, module, size, on) for name, (make, module, on) in CASES.items()
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("pair")
    return run_ranks(play, 2, folder, folder)


@pytest.mark.parametrize("name", CASES)
def test_a_resume_and_a_save_change_nothing(pair: list[Any], name: str) -> None:
    """64 bits are not rounded to 32, and a save leaves BatchNorm statistics as they are."""
    for found in pair:
        saved, resumed, plain, said = found[name]
        assert not said
        assert_same(resumed, saved)
        assert_same(plain, saved)


def test_three_ranks_sum_in_the_same_order_after_a_resume(tmp_path: Path) -> None:
    """DDP chooses its buckets again after its first backward, unless it has one before the fit."""
    for found in run_ranks(play, 3, tmp_path, tmp_path):
        saved, resumed, _, said = found["ddp"]
        assert not said
        assert_same(resumed, saved)
        assert "with `static_graph=True`, DDP sums gradients" in found["static"][-1][0]
