"""A fit that is resumed from any of its checkpoints is exact to the bit, on every replica."""

from __future__ import annotations

import errno
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.host import DDPStrategy, ModelCheckpoint, pl
from lightning_commfree.resume.contents import ENTRY, KEY
from lightning_commfree.resume.rank_files import Owner, RankFiles
from tests.fit.models import (
    Drawn,
    Noisy,
    Recorder,
    Seeded,
    Tiny,
    assert_same,
    dataset,
    info_messages,
    loader,
    quiet_trainer,
)
from tests.fit.saved import part_of, resume_warnings, sets_of
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


def resume(size: int, path: Path, data: Any = None, **settings: Any) -> dict[str, Any]:
    trainer, module, recorder, shuffled = fit(None, size, settings=settings)
    trainer.callbacks.append(begun := Begun())
    with resume_warnings() as said:
        trainer.fit(module, data or shuffled, ckpt_path=path)
    return {
        "said": said,
        "local": recorder.local,
        "outer": recorder.outer,
        "from outer": begun.with_outer_weights_of(path),
    }


def resume_and_listen(size: int, path: Path, data: Any) -> tuple[bool, bool]:
    """Resume; return whether Lightning warned of the loader, and whether we called it exact."""
    trainer, module, recorder, _ = fit(None, size)
    trainer.callbacks.remove(recorder)  # of a class that the library does not know
    with warnings.catch_warnings(record=True) as caught, info_messages() as logged:
        warnings.simplefilter("always")
        trainer.fit(module, data, ckpt_path=path)
    warned = any("your dataloader is not resumable" in str(one.message) for one in caught)
    return warned, any(text.startswith("Resumed exactly: ") for text in logged)


def listen(rank: int, size: int, folder: Path) -> list[tuple[bool, bool]]:
    trainer, module, _, data = fit(folder / "saved", size)
    trainer.fit(module, data)
    path, plain = folder / "saved" / "step=3.ckpt", folder / "plain.ckpt"
    if rank == 0:
        state = torch.load(path, weights_only=True)
        del state["lightning_commfree"]
        torch.save(state, plain)
    torch.distributed.barrier()
    return [resume_and_listen(size, path, data), resume_and_listen(size, plain, data)]


def test_lightning_does_not_call_an_exact_resume_unreliable(tmp_path: Path) -> None:
    exact, plain = run_ranks(listen, 2, tmp_path, tmp_path)[0]
    assert exact == (False, True)
    assert plain == (True, False)


def resume_seeded(rank: int, size: int, folder: Path) -> Any:
    del rank
    data = dataset(EPOCH_STEPS * BATCH * size)
    trainer, module, straight, _ = fit(folder, size)
    trainer.fit(module, DataLoader(data, BATCH, sampler=Seeded(len(data))))
    again = DataLoader(data, BATCH, sampler=Seeded(len(data)))
    return straight.local, resume(size, folder / "step=13.ckpt", again)


def test_a_sampler_that_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    for straight, resumed in run_ranks(resume_seeded, 2, tmp_path, tmp_path / "saved"):
        (said,) = resumed["said"]
        assert "`Seeded` has its own random number generator, which is not saved" in said
        last, again = straight[-1]["head.weight"], resumed["local"][-1]["head.weight"]
        assert not torch.equal(last, again), "else the message would be wrong"


def draw(random: torch.Generator) -> list[Tensor]:
    return [torch.randn(BATCH, width, generator=random) for width in (3, 1)]


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    trainer, module, straight, data = fit(folder / "straight", size)
    last = ModelCheckpoint(folder / "last", save_top_k=1, every_n_train_steps=4, save_last=True)
    trainer.callbacks.append(last)
    trainer.fit(module, data)
    trainer.strategy.barrier()
    found: dict[str, Any] = {"straight": (straight.local, straight.outer)}
    files = [path for path in (folder / "last").rglob("*") if path.is_file()]
    found["files"] = sorted(str(path.relative_to(folder / "last")) for path in files)
    for step in STOPS:
        torch.manual_seed(step)  # what else happened in the new process must not matter
        found[step] = resume(size, folder / "straight" / f"step={step}.ckpt")

    trainer, module, own, _ = fit(folder / "own", size)
    trainer.fit(module, Drawn(draw, EPOCH_STEPS, seed=rank))
    drawn = Drawn(draw, EPOCH_STEPS, seed=5 + rank)
    found["own loader"] = own.local, resume(size, folder / "own" / "step=4.ckpt", drawn)["local"]

    checkpoint = folder / "straight" / "step=13.ckpt"
    gone = folder / "gone" / "step=12.ckpt"
    trainer.strategy.barrier()
    if rank == 0:
        for copied in ("gone", "moved"):
            shutil.copytree(folder / "straight", folder / copied)
        shutil.rmtree(sets_of(gone))
        (folder / "link.ckpt").symlink_to(checkpoint)
        (folder / "moved" / "step=13.ckpt").rename(folder / "moved" / "other.ckpt")
    torch.distributed.barrier()
    found["gone"] = resume(size, gone)
    found["settings"] = resume(size, checkpoint, mix=0.25)
    found["link"] = resume(size, folder / "link.ckpt")
    found["unchecked"] = resume(size, checkpoint, check_drift_every=0)
    found["moved"] = resume(size, folder / "moved" / "other.ckpt")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(play, 2, folder, folder)


def test_a_save_has_the_listed_entries_and_the_same_ones_on_all_ranks(
    ranks: list[Any], folder: Path
) -> None:
    path = folder / "straight" / "step=13.ckpt"
    assert torch.load(path, weights_only=True)[KEY].keys() == ENTRY
    first, second = (part_of(path, rank) for rank in range(2))
    assert first.keys() == second.keys()
    assert first["optimizers"]
    assert first["shared"] is None, "it is in the checkpoint"


def test_every_step_resumes_bit_for_bit(ranks: list[Any]) -> None:
    (first, _), (second, _) = (found["straight"] for found in ranks)
    assert not torch.equal(first[0]["head.weight"], second[0]["head.weight"])
    for found in ranks:
        local, outer = found["straight"]
        assert len(local) == STEPS
        for step in STOPS:
            assert not found[step]["said"]
            assert_same(found[step]["local"], local[step:], f"after step {step}: ")
            assert_same(found[step]["outer"], outer[step:], f"after step {step}: ")


def test_every_rank_gets_the_place_of_its_own_loader_back(ranks: list[Any]) -> None:
    """Lightning keeps that of rank 0 alone."""
    for found in ranks:
        straight, resumed = found["own loader"]
        assert_same(resumed, straight[4:])


def test_missing_files_and_changed_settings_are_named(ranks: list[Any]) -> None:
    for found in ranks:
        assert "the rank files of rank 1 in" in found["gone"]["said"][0]
        assert "mix was 0.5 and is 0.25" in found["settings"]["said"][0]
        for inexact in ("gone", "settings"):
            assert found[inexact]["from outer"]
        for exact in ("link", "moved", "unchecked"):
            assert not found[exact]["said"]
            assert not found[exact]["from outer"]
            assert_same(found[exact]["local"], found["straight"][0][13:], exact)


def test_sets_of_overwritten_and_removed_checkpoints_are_removed(ranks: list[Any]) -> None:
    for found in ranks:
        checkpoints = [name for name in found["files"] if name.endswith(".ckpt")]
        assert len(checkpoints) == 2
        assert "last.ckpt" in checkpoints
        for checkpoint in checkpoints:
            own = [n for n in found["files"] if n.startswith(f".commfree/{checkpoint}/")]
            assert sum(n.endswith("rank_1.pt") for n in own) == 1, found["files"]


def alone(rank: int, size: int, path: Path) -> Any:
    resumed = resume(size, path)
    plain = quiet_trainer(strategy=DDPStrategy(), devices=size)
    validated = plain.validate(Noisy(), loader(8), ckpt_path=path, verbose=False)
    return resumed, validated, Noisy.load_from_checkpoint(path).state_dict()


def test_another_number_of_replicas_starts_from_the_outer_weights(
    ranks: list[Any], folder: Path, tmp_path: Path
) -> None:
    path = folder / "straight" / "step=13.ckpt"
    ((resumed, validated, loaded),) = run_ranks(alone, 1, tmp_path, path)
    assert "it was saved by 2 ranks, but this fit has 1" in resumed["said"][0]
    assert resumed["from outer"]
    assert validated[0]["val_loss"] > 0
    assert_same(loaded, torch.load(path, weights_only=True)["state_dict"])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        RuntimeError, match=r"(?s)Rank 3 cannot write its rank file .* `default_root_dir`"
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
