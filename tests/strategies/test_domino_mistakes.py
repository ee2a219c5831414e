"""Mistakes after which Domino would not train what the user expects are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


AVERAGES = [callbacks.StochasticWeightAveraging(swa_lrs=0.1)]
if hasattr(callbacks, "WeightAveraging"):
    AVERAGES.append(callbacks.EMAWeightAveraging())
COPIES = "`DominoTPStrategy` does not support the callback `{}`: it copies the whole"
MISTAKES: list[tuple[Any, bool, list[Any], tuple[str, ...]]] = [  # module, apart, callbacks, texts
    (CausalLM, False, [], ()),
    (Early, False, [], ("The optimizer holds ", "Make both in `configure_optimizers`")),
    (
        Rows,
        False,
        [],
        ("`Adafactor` keeps a '", "Use an optimizer that treats elements one by one"),
    ),
    (CausalLM, True, [], ("ranks of a tensor group must validate on the same batch",)),
    *((CausalLM, False, [one], (COPIES.format(type(one).__name__),)) for one in AVERAGES),
    (
        CausalLM,
        False,
        [callbacks.ModelPruning("l1_unstructured")],
        ("the callback `ModelPruning`: it would choose what",),
    ),
    (CausalLM, False, [], ()),  # a refused fit leaves nothing behind
]


def play(rank: int, size: int) -> list[str]:
    return [fit(rank, size, kind(), apart, *extra) for kind, apart, extra, _ in MISTAKES]


def test_mistakes_are_refused_on_all_ranks_and_disturb_no_good_fit(tmp_path: Path) -> None:
    for said in run_ranks(play, 2, tmp_path):
        for text, (*_, expected) in zip(said, MISTAKES, strict=True):
            assert bool(text) == bool(expected), text
            assert all(part in text for part in expected), text
