"""Units that a user names: a model without a list of blocks, gathered part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_commfree import DistributedLionStrategy, FSDPSettings, StreamingDiLoCoStrategy
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.model.blocks import outermost
from lightning_commfree.model.shards import full_tensor
from tests.fit.models import Tiny, assert_same, quiet_trainer, rank_loader
from tests.world import run_ranks

WHY_NOT = why_unavailable()
needs_fsdp = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

UNITS = FSDPSettings(["Stage", "Head"])
BATCHES, BATCH = 6, 2


class Stage(nn.Module):
    def __init__(self, wide: int, inner: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, wide)
        self.back = nn.Linear(wide, 6)
        self.inner = Stage(3) if inner else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back(torch.tanh(self.linear(x)))
        return x if self.inner is None else self.inner(x)


class Head(nn.Linear):
    pass


class Staged(Tiny):
    """Two stages of different sizes, of which one holds another, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.first, self.second = Stage(5), Stage(9, inner=True)
        self.head = Head(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embed(x))))


def fit(rank: int, size: int, inside: Any) -> Any:
    strategy = StreamingDiLoCoStrategy(
        sync_every=2, wire_dtype="fp32", replica_size=2, inside=inside
    )
    trainer = quiet_trainer(strategy=strategy, devices=size, max_epochs=1)
    torch.manual_seed(2)
    module = Staged()
    try:
        trainer.fit(module, rank_loader(BATCHES * BATCH * size, BATCH, rank, size))
    except ValueError as error:
        return str(error)
    units = [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]
    return {name: full_tensor(p).clone() for name, p in module.named_parameters()}, units


def fits(rank: int, size: int) -> Any:
    wrong = FSDPSettings(["Stage", "Stge"])
    return [fit(rank, size, inside) for inside in ("ddp", "fsdp", UNITS, wrong)]


@needs_fsdp
def test_named_units_are_gathered_apart_and_train_as_copies_do(tmp_path: Path) -> None:
    for (ddp, _), (whole_model, one), (parts, units), refused in run_ranks(fits, 4, tmp_path):
        assert one == [""]
        assert units == ["", "head", "first", "second"]
        assert_same(parts, ddp)
        assert_same(whole_model, ddp)
        assert "`units` contains 'Stge', but `Staged` has no submodule of that class" in refused
        assert "Choose from its classes: Head, Linear, ModuleList, Stage." in refused


def test_one_unit_is_not_inside_of_another() -> None:
    assert outermost(Staged(), ["Stage"]) == ["first", "second"]
    with pytest.raises(
        ValueError, match="contains 'Linear', but .* has no submodule of that class"
    ):
        outermost(nn.Sequential(Head(2, 2)), ["Head", "Linear"])


@pytest.mark.parametrize("units", ["Stage", [Stage], 3])
def test_units_are_names(units: Any) -> None:
    with pytest.raises(TypeError, match=r"`units=.*` must be a list of class names, such as \['St"):
        FSDPSettings(units)


@pytest.mark.parametrize("kind", [StreamingDiLoCoStrategy, DistributedLionStrategy])
def test_one_rank_has_nothing_to_divide(kind: Any) -> None:
    with pytest.raises(ValueError, match="shards a model over several ranks, but with"):
        kind(inside=UNITS)
