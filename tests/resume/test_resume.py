"""A fit that is resumed from any of its checkpoints is exact to the bit, on every replica."""

from __future__ import annotations

import errno
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.resume.rank_files import Owner, RankFiles
from tests.strategies.models import (
    Drawn,
    Noisy,
    Recorder,
    Tiny,
    assert_same,
    dataset,
    loader,
    quiet_trainer,
)
from tests.strategies.saved import sets_of
from tests.world import run_ranks

BATCH = 2
EPOCH_STEPS = 9  # not a multiple of the cycle
STEPS = 2 * EPOCH_STEPS
# with none, one and two fragments in flight, around the end of the epoch, and just before the end
STOPS = (1, 3, 6, 8, 9, 10, 13, 17)
SETTINGS: dict[str, Any] = {
    "sync_every": 6,
    "num_fragments": 3,
    "overlap_steps": 3,  # above 6 / 3, so that two fragments are in flight at some steps
    "wire_dtype": "fp4",
    "outer_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}


class Scheduled(Noisy):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Begun(pl.Callback):
    """Keeps what the first batch of a fit is trained with."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.outer: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not self.weights:
            self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
            with trainer.strategy.outer_weights():
                self.outer = {name: p.detach().clone() for name, p in module.named_parameters()}

    def with_outer_weights_of(self, path: Path) -> bool:
        saved = torch.load(path, weights_only=True)["state_dict"]
        return all(
            torch.equal(weights[name], saved[name])
            for weights in (self.weights, self.outer)
            for name in saved
        )


def fit(folder: Path | None, size: int, module: Tiny | None = None, **kwargs: Any) -> Any:
    """A shuffling loader: Lightning puts its own DistributedSampler in. Without a folder nothing is
    saved."""
    recorder = Recorder()
    settings = {**SETTINGS, **kwargs.pop("settings", {})}
    save = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
    )
    callbacks: list[pl.Callback] = [recorder, save] if folder else [recorder]
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(**settings),
        devices=size,
        enable_checkpointing=folder is not None,
        callbacks=callbacks,
        max_epochs=2,
        **kwargs,
    )
    module = module or Scheduled()
    data = DataLoader(dataset(EPOCH_STEPS * BATCH * size), batch_size=BATCH, shuffle=True)
    return trainer, module, recorder, data


def straight_and_resumed(rank: int, size: int, folder: Path) -> Any:
    trainer, module, straight, data = fit(folder / "straight", size)
    trainer.fit(module, data)
    resumed = {}
    for step in STOPS:
        torch.manual_seed(step)  # what else happened in the new process must not matter
        again, module, recorder, data = fit(None, size)
        again.fit(module, data, ckpt_path=folder / "straight" / f"step={step}.ckpt")
        resumed[step] = recorder.local, recorder.outer
    return straight.local, straight.outer, resumed


def test_every_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    ranks = run_ranks(straight_and_resumed, 2, tmp_path, tmp_path)
    assert not torch.equal(ranks[0][0][0]["head.weight"], ranks[1][0][0]["head.weight"])
    for rank, (local, outer, resumed) in enumerate(ranks):
        assert len(local) == STEPS
        for step, (got_local, got_outer) in resumed.items():
            assert len(got_local) == STEPS - step, f"resumed after step {step}"
            assert_same(got_local, local[step:])
            for got_copies, copies in zip(got_outer, outer[step:], strict=True):
                assert all(map(torch.equal, got_copies, copies)), (rank, step)


def draw(random: torch.Generator) -> list[Tensor]:
    return [torch.randn(BATCH, width, generator=random) for width in (3, 1)]


def own_loaders(rank: int, size: int, folder: Path) -> Any:
    trainer, module, straight, _ = fit(folder / "straight", size)
    trainer.fit(module, Drawn(draw, EPOCH_STEPS, seed=rank))
    again, module, resumed, _ = fit(folder / "resumed", size)
    checkpoint = folder / "straight" / "step=4.ckpt"
    again.fit(module, Drawn(draw, EPOCH_STEPS, seed=5 + rank), ckpt_path=checkpoint)
    return straight.local[4:], resumed.local


def test_every_rank_gets_the_place_of_its_own_loader_back(tmp_path: Path) -> None:
    """Lightning keeps that of rank 0 alone."""
    for straight, resumed in run_ranks(own_loaders, 2, tmp_path, tmp_path):
        assert_same(resumed, straight)


def other_worlds(rank: int, size: int, folder: Path) -> Any:
    trainer, module, _, data = fit(folder / "first", size)
    trainer.fit(module, data)
    checkpoint = folder / "first" / "step=13.ckpt"
    trainer.strategy.barrier()
    if rank == 0:
        shutil.copytree(folder / "first", folder / "moved")
        shutil.rmtree(sets_of(folder / "first" / "step=12.ckpt"))
        (folder / "link.ckpt").symlink_to(checkpoint)
        (folder / "moved" / "step=13.ckpt").rename(folder / "moved" / "other.ckpt")
    trainer.strategy.barrier()
    texts = {}
    for name, path, settings in (
        ("gone", folder / "first" / "step=12.ckpt", {}),
        ("settings", checkpoint, {"mix": 0.25}),
        ("link", folder / "link.ckpt", {}),
        ("unchecked", checkpoint, {"check_drift_every": 0}),
        ("moved", folder / "moved" / "other.ckpt", {}),
    ):
        again, module, recorder, data = fit(folder / name, size, settings=settings)
        again.callbacks.append(begun := Begun())
        with pytest.MonkeyPatch.context() as patch:
            said: list[str] = []
            patch.setattr("lightning_commfree.resume.exact.rank_zero_warn", said.append)
            again.fit(module, data, ckpt_path=path)
        texts[name] = said, recorder.local[-1], begun.with_outer_weights_of(path)
    return texts


def test_missing_files_and_changed_settings_are_named(tmp_path: Path) -> None:
    for texts in run_ranks(other_worlds, 2, tmp_path, tmp_path):
        assert "the files of rank 1 below" in texts["gone"][0][0]
        assert "mix was 0.5 and is 0.25" in texts["settings"][0][0]
        assert not texts["link"][0]
        assert not texts["moved"][0]
        assert not texts["unchecked"][0]
        from_outer = {name: outer for name, (*_, outer) in texts.items()}
        assert from_outer == {
            "gone": True,
            "settings": True,
            "link": False,
            "unchecked": False,
            "moved": False,
        }
        for same in ("moved", "unchecked"):
            assert_same(texts[same][1], texts["link"][1])


def alone(rank: int, size: int, folder: Path) -> Any:
    path = folder / "step=13.ckpt"
    again, module, _, data = fit(folder / "alone", size)
    again.callbacks.append(begun := Begun())
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("lightning_commfree.resume.exact.rank_zero_warn", said.append)
        again.fit(module, data, ckpt_path=path)
    state = torch.load(path, weights_only=True)
    plain = quiet_trainer(strategy=DDPStrategy(), devices=size)
    validated = plain.validate(Noisy(), loader(8), ckpt_path=path, verbose=False)
    loaded = Noisy.load_from_checkpoint(path).state_dict()
    same = all(torch.equal(loaded[k], v) for k, v in state["state_dict"].items())
    return said, validated, same, begun.with_outer_weights_of(path)


def first_fit(rank: int, size: int, folder: Path) -> None:
    trainer, module, _, data = fit(folder, size)
    trainer.fit(module, data)


def test_another_number_of_replicas_starts_from_the_outer_weights(tmp_path: Path) -> None:
    run_ranks(first_fit, 2, tmp_path, tmp_path)
    ((said, validated, same, from_outer),) = run_ranks(alone, 1, tmp_path, tmp_path)
    assert "it was saved by 2 ranks, these are 1" in said[0]
    assert validated[0]["val_loss"] > 0
    assert same
    assert from_outer


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        RuntimeError, match=r"(?s)Rank 3 cannot write its part .* `default_root_dir`"
    ):
        RankFiles(tmp_path / "file" / "a.ckpt").write(Owner(3, 4, "1-a"), {})


def test_old_files_that_cannot_be_removed_do_not_end_a_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines on a network disk remove the same folder: what the slower one gets varies."""
    files = RankFiles(tmp_path / "a.ckpt")
    for token in ("1-a", "2-b"):
        files.write(Owner(1, 2, token), {"of": token})

    def stale(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    def found(token: str) -> Any:
        return files.read(Owner(1, 2, token), files.folder(token))

    monkeypatch.setattr(files._fs, "rm", stale)
    files.remove_older("2-b")
    files.remove()
    assert found("2-b") == {"of": "2-b"}
    monkeypatch.undo()
    files.remove_older("2-b")
    assert found("1-a") is None


def overwriting(rank: int, size: int, folder: Path) -> list[str]:
    trainer, module, _, data = fit(folder / "all", size)
    last = ModelCheckpoint(folder / "last", save_top_k=1, every_n_train_steps=4, save_last=True)
    trainer.callbacks.append(last)
    trainer.fit(module, data)
    trainer.strategy.barrier()
    files = [path for path in (folder / "last").rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder / "last")) for path in files)


def test_sets_of_overwritten_and_removed_checkpoints_go(tmp_path: Path) -> None:
    for files in run_ranks(overwriting, 2, tmp_path, tmp_path):
        checkpoints = [name for name in files if name.endswith(".ckpt")]
        assert len(checkpoints) == 2
        assert "last.ckpt" in checkpoints
        for checkpoint in checkpoints:
            for rank in range(1, 2):
                own = [n for n in files if n.startswith(f".commfree/{checkpoint}/")]
                assert sum(n.endswith(f"rank_{rank}.pt") for n in own) == 1, files
