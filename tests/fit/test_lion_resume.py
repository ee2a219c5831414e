"""A Distributed Lion fit that is resumed goes on bit for bit, with every worker's own momentum; on
another number of workers momenta are taken over as far as they go, and a message says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_commfree import DistributedLion, DistributedLionStrategy
from tests.fit.models import Noisy, Recorder, assert_same, dataset, quiet_trainer
from tests.fit.saved import part_of, resume_warnings
from tests.world import run_ranks

EPOCH_STEPS = 5
STEPS = 2 * EPOCH_STEPS
SIZE = 4  # even: there are ties to be drawn
SETTINGS: dict[str, Any] = {"ties": "random"}


class Voter(Noisy):
    def configure_optimizers(self) -> Any:
        optimizer = DistributedLion(self.parameters(), lr=0.02, weight_decay=0.3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Momenta(Recorder):
    """Also keeps this rank's momenta at the beginning of the fit."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.momenta = _momenta(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.last = _momenta(trainer)


def _momenta(trainer: Any) -> list[Tensor]:
    return [state["momentum"].clone() for state in trainer.optimizers[0].state.values()]


def fit(folder: Path | None, size: int, **kwargs: Any) -> Any:
    recorder = Momenta()
    settings = {**SETTINGS, **kwargs.pop("settings", {})}
    save = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
    )
    trainer = quiet_trainer(
        strategy=DistributedLionStrategy(**settings),
        devices=size,
        enable_checkpointing=folder is not None,
        callbacks=[recorder, save] if folder else [recorder],
        max_epochs=2,
    )
    data = DataLoader(dataset(EPOCH_STEPS * 2 * size), batch_size=2, shuffle=True)
    with resume_warnings() as said:
        trainer.fit(Voter(), data, ckpt_path=kwargs.get("ckpt_path"))
    return recorder, said


def straight_and_resumed(rank: int, size: int, folder: Path) -> Any:
    straight, _ = fit(folder / "straight", size)
    resumed = {}
    for step in (1, 4, 5, 6, 9):  # 5: the end of an epoch
        torch.manual_seed(step)  # what else happened in the new process must not matter
        path = folder / "straight" / f"step={step}.ckpt"
        recorder, said = fit(None, size, ckpt_path=path)
        resumed[step] = recorder.local, recorder.last, said
    changed, said = fit(None, size, ckpt_path=path, settings={"ties": "zero"})
    return straight.local, straight.last, resumed, (changed.momenta, said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return run_ranks(straight_and_resumed, SIZE, folder, folder)


def test_every_step_resumes_bit_for_bit(ranks: list[Any]) -> None:
    assert not torch.equal(ranks[0][1][0], ranks[1][1][0]), "momenta differ from rank to rank"
    for rank, (local, last, resumed, _) in enumerate(ranks):
        assert len(local) == STEPS
        for step, (got_local, got_last, said) in resumed.items():
            assert not said
            assert len(got_local) == STEPS - step, f"resumed after step {step}"
            assert_same(got_local, local[step:])
            assert all(map(torch.equal, got_last, last)), (rank, step)


def saved_momenta(folder: Path) -> list[list[Tensor]]:
    """Return every rank's momenta in the file of step 9."""
    path = folder / "straight" / "step=9.ckpt"
    states = [part_of(path, rank)["optimizers"][0]["state"] for rank in range(SIZE)]
    return [[state["momentum"] for state in own.values()] for own in states]


def test_changed_settings_keep_every_momentum_and_say_so(ranks: list[Any], folder: Path) -> None:
    saved = saved_momenta(folder)
    assert len(saved) == SIZE
    for rank, (*_, (momenta, said)) in enumerate(ranks):
        assert all(map(torch.equal, momenta, saved[rank]))
        if rank == 0:
            assert "ties was 'random' and is 'zero'" in said[0]
            assert "every worker continues with its own momentum." in said[0]


def other_size(rank: int, size: int, folder: Path, path: Path, **settings: Any) -> Any:
    recorder, said = fit(folder, size, ckpt_path=path, settings=settings)
    return recorder.momenta, said, recorder.local


def nodes_of_two(rank: int, size: int, folder: Path, path: Path) -> Any:
    return other_size(rank, size, folder, path, node_size=2)


def test_other_numbers_of_workers(ranks: list[Any], folder: Path, tmp_path: Path) -> None:
    saved = saved_momenta(folder)
    means = [sum(workers) / SIZE for workers in zip(*saved, strict=True)]
    path = folder / "straight" / "step=9.ckpt"
    for size in (3, 5):  # fewer, and more
        (tmp_path / str(size)).mkdir()
        outcomes = run_ranks(other_size, size, tmp_path / str(size), tmp_path, path)
        for rank, (momenta, said, local) in enumerate(outcomes):
            expected = saved[rank] if rank < SIZE else means
            for got, wanted in zip(momenta, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)
            assert_same(local[-1], outcomes[0][2][-1])
            if rank == 0:
                assert f"it was saved by 4 ranks, but this fit has {size}" in said[0]
                assert ("workers from index 4 start with the mean of all" in said[0]) == (size == 5)
    nodes = run_ranks(nodes_of_two, SIZE, tmp_path, tmp_path, path)
    for rank, (momenta, _, _) in enumerate(nodes):
        assert all(map(torch.equal, momenta, saved[rank // 2])), "a node is one worker"
    assert "node_size was 1 and is 2" in nodes[0][1][0]


def test_without_the_other_ranks_files_rank_0s_momentum_is_taken(
    ranks: list[Any], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "straight", tmp_path / "copied")
    shutil.rmtree(tmp_path / "copied" / ".commfree")
    saved = saved_momenta(folder)
    outcomes = run_ranks(other_size, 3, tmp_path, tmp_path, tmp_path / "copied" / "step=9.ckpt")
    for momenta, _, _ in outcomes:
        assert all(map(torch.equal, momenta, saved[0]))
    assert "with the optimizer state of rank 0" in outcomes[0][1][0]
