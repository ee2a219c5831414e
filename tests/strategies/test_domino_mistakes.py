"""What would train something else than the user thinks ends a fit with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader, DistributedSampler

from lightning_commfree import DominoTPStrategy
from tests.strategies.causal_lm import CausalLM, words
from tests.strategies.models import quiet_trainer
from tests.world import run_ranks


class Early(CausalLM):
    """Makes its optimizer before the model is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Rows(CausalLM):
    """Its optimizer keeps a number for a row and one for a column."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def fit(rank: int, size: int, module: CausalLM, apart: bool = False, *extra: Any) -> str:
    """Train on the same rows on all ranks; `apart`: validate on other ones on each."""
    trainer = quiet_trainer(
        strategy=DominoTPStrategy(),
        devices=size,
        max_steps=2,
        use_distributed_sampler=False,
        callbacks=list(extra),
    )
    rows = words(4 * size)
    sampler = DistributedSampler(rows, size, rank if apart else 0, shuffle=False)
    validation = DataLoader(rows, batch_size=2, sampler=sampler)
    try:
        trainer.fit(module, DataLoader(rows, batch_size=2), validation)
    except ValueError as error:
        return str(error)
    return ""


def play(rank: int, size: int) -> dict[str, str]:
    averages = [callbacks.StochasticWeightAveraging(swa_lrs=0.1)]
    if hasattr(callbacks, "WeightAveraging"):
        averages.append(callbacks.EMAWeightAveraging())
    return {
        "good": fit(rank, size, CausalLM()),
        "early": fit(rank, size, Early()),
        "apart": fit(rank, size, CausalLM(), True),
        "rows": fit(rank, size, Rows()),
        **{type(one).__name__: fit(rank, size, CausalLM(), False, one) for one in averages},
        "pruning": fit(rank, size, CausalLM(), False, callbacks.ModelPruning("l1_unstructured")),
        "good again": fit(rank, size, CausalLM()),
    }


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(play, 2, tmp_path_factory.mktemp("two"))


def test_an_optimizer_made_before_the_fit_is_refused(said: list[dict[str, str]]) -> None:
    for texts in said:
        assert texts["early"].startswith("The optimizer holds ")
        assert "Create both in `configure_optimizers`" in texts["early"]


def test_an_optimizer_that_looks_at_whole_rows_is_refused(said: list[dict[str, str]]) -> None:
    for texts in said:
        assert texts["rows"].startswith("`Adafactor` keeps a '")
        assert "Use an element-wise optimizer" in texts["rows"]


def test_validation_batches_of_a_group_must_be_the_same(said: list[dict[str, str]]) -> None:
    for texts in said:
        assert "ranks of a tensor group must validate on the same batch" in texts["apart"]


def test_callbacks_that_copy_the_undivided_model_are_refused(said: list[dict[str, str]]) -> None:
    for texts in said:
        refused = {name: text for name, text in texts.items() if name.endswith("Averaging")}
        assert refused
        for name, text in refused.items():
            assert text.startswith(
                f"`DominoTPStrategy` does not support the callback `{name}`: it copies the full"
            )


def test_pruning_of_parts_is_refused(said: list[dict[str, str]]) -> None:
    for texts in said:
        assert texts["pruning"].startswith(
            "`DominoTPStrategy` does not support the callback `ModelPruning`: it would choose what"
        )


def test_nothing_of_it_stands_in_the_way_of_a_good_fit(said: list[dict[str, str]]) -> None:
    for texts in said:
        assert texts["good"] == texts["good again"] == ""
