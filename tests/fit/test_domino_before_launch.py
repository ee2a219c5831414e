"""Mistakes in a Domino fit are refused in the user's process, before ranks are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as Forking
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as Copying

from lightning_commfree import DominoTPStrategy
from tests.fit.causal_lm import CausalLM, loader
from tests.fit.models import Tiny, quiet_trainer


class LaunchedError(Exception):
    """Ranks would have been made."""


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any, **__: Any) -> None:
        raise LaunchedError

    for launcher in (Forking, Copying):
        monkeypatch.setattr(launcher, "launch", launch)


def fit(
    module: Any, start_method: str = "fork", devices: int = 2, *extra: Any, **kwargs: Any
) -> None:
    strategy = DominoTPStrategy(start_method=start_method, **kwargs)
    quiet_trainer(strategy=strategy, devices=devices, callbacks=list(extra)).fit(
        module, loader(8, 2)
    )


class Later(CausalLM):
    """Its model is not there before its ranks are."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.wrapped["lm"]
        del self.wrapped["lm"], self._modules["made"]

    def configure_model(self) -> None:
        """Called on every rank."""


@pytest.mark.parametrize("start_method", ["fork", "spawn", "popen"])
def test_heads_that_ranks_cannot_share(start_method: str) -> None:
    with pytest.raises(
        ValueError, match="has 4 attention heads, which cannot be split evenly across 3"
    ):
        fit(CausalLM(), start_method, 3)


def test_other_mistakes_are_refused_before_launch() -> None:
    with pytest.raises(ValueError, match=r"\(3\) is not divisible by `tensor_parallel_size=2`"):
        fit(CausalLM(), devices=3, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="found no model in `Tiny` that it can shard"):
        fit(Tiny())
    with pytest.raises(ValueError, match="does not support a LightningModule compiled with"):
        fit(torch.compile(CausalLM()))
    with pytest.raises(ValueError, match="does not support the callback `ModelPruning`"):
        fit(CausalLM(), "fork", 2, ModelPruning("l1_unstructured"))


@pytest.mark.parametrize("start_method", ["fork", "popen"])
def test_good_models_and_models_built_on_the_ranks_are_launched(start_method: str) -> None:
    with pytest.raises(LaunchedError):
        fit(CausalLM(), start_method)
    with pytest.raises(LaunchedError):
        fit(Later(), start_method, 3)
