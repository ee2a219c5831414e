"""Lightning's learning-rate finder: a search does not change the fit after it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from tests.fit.causal_lm import CausalLM
from tests.fit.causal_lm import loader as words
from tests.fit.models import Recorder, Tiny, assert_same, quiet_trainer, rank_loader
from tests.world import run_ranks

TRIED = 8
OLD = not hasattr(callbacks, "WeightAveraging")  # Lightning before 2.6


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=self.lr / 10)


class Finder(LearningRateFinder):
    """Searches when the fit begins, and keeps the learning rate."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=TRIED, update_attr=False, early_stop_threshold=None)


def fit(rank: int, size: int, folder: Path, module: Any, strategy: Any, *finders: Any) -> Any:
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=3,
        gradient_clip_val=1.0,
        callbacks=[*finders, recorder],
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    text = isinstance(module, CausalLM)  # all ranks of a tensor group read the same
    trainer.fit(module, words(40, 4) if text else rank_loader(40, 2, rank, size))
    found = [finder.optimal_lr.results for finder in finders]
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return recorder.local, state, found


STRATEGIES: dict[str, Any] = {
    "lion": (Voter, DistributedLionStrategy),
    # "auto" keeps the timings of a search
    "domino": (CausalLM, lambda: DominoTPStrategy(split="batch")),
}


def many(rank: int, size: int, folder: Path) -> Any:
    return {
        name: (
            fit(rank, size, folder, module(), strategy()),
            fit(rank, size, folder, module(), strategy(), Finder()),
        )
        for name, (module, strategy) in STRATEGIES.items()
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lr_find")
    torch.compile(nn.Linear(1, 1))  # imports for seconds: here, and not on every rank
    return run_ranks(many, 2, folder, folder)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_leaves_nothing_behind(ranks: Any, name: str) -> None:
    found = []
    for rank in ranks:
        (expected, expected_state, _), (local, state, tried) = rank[name]
        if OLD and len(local) < len(expected):
            pytest.skip("before 2.6 the epoch after a search is cut short, whatever the strategy")
        assert_same(local, expected)
        assert_same(state, expected_state)
        found.append(tried[0])
    assert found[0] == found[1]
    assert len(found[0]["lr"]) == TRIED
    assert len(set(found[0]["loss"])) > TRIED // 2, "it trained"


def refuse(rank: int, size: int, folder: Path) -> list[str]:
    data = rank_loader(40, 2, rank, size)
    said = []
    for finds in (False, True):
        trainer = quiet_trainer(
            strategy=StreamingDiLoCoStrategy(sync_every=4),
            devices=size,
            max_epochs=2,
            default_root_dir=folder,
            callbacks=[] if finds else [Finder()],
        )
        run = partial(Tuner(trainer).lr_find, num_training=30) if finds else trainer.fit
        with pytest.raises(ValueError, match="its trial steps would be counted") as refused:
            run(Tiny(), data)
        said.append(str(refused.value))
    return said


def test_replicas_that_train_apart_refuse_a_search(tmp_path: Path) -> None:
    for said in run_ranks(refuse, 2, tmp_path, tmp_path):
        for text in said:
            assert "Run it, or `Tuner.lr_find`, with the `ddp` strategy, and use the" in text
