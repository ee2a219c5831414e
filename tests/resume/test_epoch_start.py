"""A fit resumed in the middle of an epoch or of an accumulation, whoever shuffles the data."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.fit.models import (
    Noisy,
    Recorder,
    SavesAfterBatches,
    dataset,
    loader,
    quiet_trainer,
)
from tests.fit.saved import part_of
from tests.world import run_ranks

EPOCH_BATCHES, BATCH = 5, 2


class Augmented(Dataset[Any]):
    """Adds noise to every row when it is read."""

    def __init__(self, rows: int) -> None:
        self._rows = dataset(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self._rows[index]
        return x + 0.1 * torch.randn(3), y


class Preparing(Noisy):
    """Draws numbers when loaders are made, and before the first batch of a fit is read."""

    def __init__(self, made: DataLoader[Any]) -> None:
        super().__init__()
        self._made = made

    def train_dataloader(self) -> DataLoader[Any]:
        torch.rand(3)
        return self._made

    def on_train_start(self) -> None:
        torch.rand(3)


def loaders(size: int) -> dict[str, tuple[DataLoader[Any], dict[str, Any]]]:
    rows = EPOCH_BATCHES * BATCH
    own = {"use_distributed_sampler": False}
    weights, seeded = [1.0] * rows * size, torch.Generator().manual_seed(5)
    drawn = WeightedRandomSampler(weights, rows * size)
    by_seed = WeightedRandomSampler(weights, rows * size, generator=seeded)
    workers: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": 1}
    return {
        "weighted": (DataLoader(dataset(rows * size), BATCH, sampler=drawn), {}),
        "seeded": (
            DataLoader(dataset(rows * size), BATCH, sampler=by_seed, generator=seeded),
            {},
        ),
        "shuffled": (DataLoader(Augmented(rows), BATCH, shuffle=True), own),
        "workers": (DataLoader(dataset(rows), **workers), own),
        "seeded workers": (
            DataLoader(dataset(rows), **workers, generator=torch.Generator().manual_seed(6)),
            own,
        ),
        "workers that stay": (DataLoader(dataset(rows), **workers, persistent_workers=True), own),
    }


class Voting(Preparing):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.01)


def fit(
    size: int, case: str, *extra: pl.Callback, kind: type[Preparing] = Preparing, **kwargs: Any
) -> list[dict[str, Tensor]]:
    made, settings = loaders(size)[case]
    path = kwargs.pop("ckpt_path", None)
    recorder = Recorder()
    diloco = StreamingDiLoCoStrategy(sync_every=3, num_fragments=3)
    trainer = quiet_trainer(
        strategy=DistributedLionStrategy() if kind is Voting else diloco,
        devices=size,
        max_epochs=2,
        callbacks=[recorder, *extra],
        **settings,
        **kwargs,
    )
    trainer.fit(kind(made), ckpt_path=path)
    return recorder.local


def differing(straight: list[Any], resumed: list[Any], batches: int) -> list[str]:
    assert len(resumed) == len(straight) - batches
    return [
        f"{name} after batch {batches + i + 1}"
        for i, (got, expected) in enumerate(zip(resumed, straight[batches:], strict=True))
        for name in expected
        if not torch.equal(got[name], expected[name])
    ]


def in_the_middle(rank: int, size: int, folder: Path) -> dict[str, list[str]]:
    # loaders' workers are its children
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # on a busy machine, a worker may end before its last descriptor has been received
    torch.multiprocessing.set_sharing_strategy("file_system")
    found = {}
    for case in loaders(size):
        saves = folder / case
        straight = fit(size, case, SavesAfterBatches(saves, 2, 7))
        again = folder / f"{case} again"
        for batches in (2, 7):
            saving = [SavesAfterBatches(again, 2)] if batches == 7 else []
            resumed = fit(size, case, *saving, ckpt_path=saves / f"{batches}.ckpt")
            found[f"{case}, {batches}"] = differing(straight, resumed, batches)
        # it was saved in the first epoch that a resumed fit had, two batches after its beginning
        twice = fit(size, case, ckpt_path=again / "2.ckpt")
        found[f"{case}, twice"] = differing(straight, twice, 9)
    return found


def test_every_kind_of_loader_resumes_exactly_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    for found in run_ranks(in_the_middle, 2, tmp_path, tmp_path):
        assert len(found) == 18
        assert not {case: names for case, names in found.items() if names}


def half_a_step(
    rank: int, size: int, folder: Path, kind: type[Preparing]
) -> tuple[dict[int, list[str]], list[int]]:
    three: dict[str, Any] = {"accumulate_grad_batches": 3, "kind": kind}
    straight = fit(size, "shuffled", SavesAfterBatches(folder, 1, 3, 5), **three)
    found, kept = {}, []
    for batches in (1, 3, 5):
        path = folder / f"{batches}.ckpt"
        resumed = fit(size, "shuffled", ckpt_path=path, **three)
        found[batches] = differing(straight, resumed, batches)
        kept.append(len(part_of(path, rank)["gradients"]))
    return found, kept


@pytest.mark.parametrize("kind", [Preparing, Voting])
def test_gradients_of_a_half_accumulated_step_come_back(
    kind: type[Preparing], tmp_path: Path
) -> None:
    for found, kept in run_ranks(half_a_step, 2, tmp_path, tmp_path, kind):
        assert not {batches: names for batches, names in found.items() if names}
        assert [count > 0 for count in kept] == [True, False, False]


class Exporting(Noisy):
    """Puts its weights into the checkpoint a second time, as adapters are exported."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["exported"] = self.state_dict()
        checkpoint["more"] = {"parameters": [self.head.weight]}


def export(rank: int, size: int, folder: Path) -> Any:
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(sync_every=3, num_fragments=3),
        devices=size,
        max_steps=8,
        callbacks=[recorder, SavesAfterBatches(folder, 5)],
    )
    trainer.fit(Exporting(), loader(16 * size))
    own_again = "save_checkpoint" not in vars(trainer)
    saved = torch.load(folder / "5.ckpt", weights_only=True)
    (head,) = saved["more"]["parameters"]
    return {**saved["exported"], "head": head}, saved["state_dict"], recorder.local[4], own_again


def test_on_save_checkpoint_sees_the_outer_weights(tmp_path: Path) -> None:
    for exported, state, local, own_again in run_ranks(export, 2, tmp_path, tmp_path):
        assert torch.equal(exported.pop("head"), state["head.weight"])
        for name in exported:
            assert torch.equal(exported[name], state[name]), name
        assert not torch.equal(exported["head.weight"], local["head.weight"])
        assert own_again
